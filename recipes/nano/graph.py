"""A whole training step (forward, loss, backward, clipping, AdamW, average of the weights) as one
CUDA graph.

With models this small nearly all time of an eager step is spent starting kernels; a graph starts
them all at once. The loss function must use static shapes and read what changes (rows, learning
rate) from tensors. Without a GPU the same step runs eagerly, in several processes if there is time
for it. Called by the three training steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.nano.report import say

Loss = Callable[[bool], tuple[Tensor, Tensor]]
"""(autocast to bfloat16?) -> (loss, vector of numbers to report)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    seconds: float  # of training, capture included
    rate: float = 1e-3
    floor: float = 0.05  # of the rate, at the end
    warm_up: int = 300  # steps
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.05
    clip: float = 1.0
    average: float = 0.999
    max_steps: int | None = None  # tests
    eager: bool = False  # no graph: some five times slower, for where capture fails


@dataclass(slots=True, eq=False)
class Trainer:
    name: str
    parameters: list[nn.Parameter]
    averaged: list[nn.Parameter]  # those with a running average; others are kept up otherwise
    loss: Loss
    schedule: Schedule
    labels: tuple[str, ...]
    device: torch.device
    bfloat16: bool | None = None  # None: the faster of the two
    # matrix products in full float32; convolutions are TF32 all the same
    exact_products: bool = False
    after_block: Callable[[int], None] | None = None  # called every `block` steps, with the step
    block: int = 32
    every: float = 15.0  # seconds between reports
    step: int = 0
    ended: bool = False
    rate: Tensor = field(init=False)
    bad: Tensor = field(init=False)
    weight: Tensor = field(init=False)
    done: Tensor = field(init=False)  # how far training is, 0 to 1
    sums: Tensor = field(init=False)
    optimizer: torch.optim.AdamW = field(init=False)
    average: list[Tensor] = field(init=False)
    started: float = field(init=False)

    def __post_init__(self) -> None:
        cuda = self.device.type == "cuda"
        self.rate, self.bad, self.weight, self.done = (
            torch.zeros((), device=self.device) for _ in range(4)
        )
        self.sums = torch.zeros(len(self.labels) + 2, device=self.device)
        self.average = [p.detach().clone() for p in self.averaged]
        extra: dict[str, bool] = {"fused": True, "capturable": True} if cuda else {"foreach": False}
        rate: float | Tensor = self.rate if cuda else self.schedule.rate
        self.optimizer = torch.optim.AdamW(
            self._groups(),
            rate,
            betas=self.schedule.betas,
            weight_decay=self.schedule.decay,
            **extra,
        )
        if cuda:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate  # one tensor, filled before each step
            self.optimizer.found_inf = (
                self.bad
            )  # the fused kernel leaves everything as it is if this is 1
        self.started = time.monotonic()

    def _groups(self) -> list[dict[str, object]]:
        flat = [p for p in self.parameters if p.ndim < 2]
        return [
            {"params": [p for p in self.parameters if p.ndim >= 2]},
            *([{"params": flat, "weight_decay": 0.0}] if flat else []),
        ]

    def _step(self, bfloat16: bool) -> None:
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False
        ):
            loss, numbers = self.loss(bfloat16)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.schedule.clip)
        self.bad.copy_((~torch.isfinite(norm)).float())
        self.optimizer.step()
        with torch.no_grad():
            change = torch._foreach_sub([p.detach() for p in self.averaged], self.average)
            torch._foreach_mul_(change, self.weight)
            torch._foreach_add_(self.average, change)
            self.sums.add_(
                torch.cat(
                    (torch.stack((loss.detach().float(), self.bad)), numbers.detach().float())
                )
            )

    def _prepare(self) -> None:
        """The learning rate and the average's weight of the next step."""
        s = self.schedule
        done = (time.monotonic() - self.started) / s.seconds
        if s.max_steps is not None:
            done = self.step / s.max_steps
        self.done.fill_(min(1.0, done))
        cosine = s.floor + (1 - s.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        rate = s.rate * min(1.0, (self.step + 1) / s.warm_up) * cosine
        self.rate.fill_(rate)
        if self.device.type != "cuda":
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self.weight.fill_(1 - min(s.average, (2 + self.step) / (11 + self.step)))
        self.step += 1

    def _eager(self, bfloat16: bool) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._step(bfloat16)

    def _timed(self, run: Callable[[], None], steps: int) -> float:
        torch.cuda.synchronize()
        start = time.monotonic()
        for _ in range(steps):
            self._prepare()
            run()
        torch.cuda.synchronize()
        return steps / (time.monotonic() - start)

    def _capture(self, bfloat16: bool) -> tuple[float, torch.cuda.CUDAGraph]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        start = time.monotonic()
        with torch.cuda.stream(side):
            self._timed(lambda: self._eager(bfloat16), 3)
            eager = self._timed(lambda: self._eager(bfloat16), 4)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self._step(bfloat16)
        speed = self._timed(graph.replay, 12)
        memory = torch.cuda.max_memory_allocated() / 2**30
        say(
            self.name,
            f"{'bfloat16' if bfloat16 else 'tf32'}: eager {eager:.1f} steps/s, graph {speed:.1f}, "
            f"{memory:.1f} GiB, captured in {time.monotonic() - start:.1f} s",
        )
        return speed, graph

    def _runner(self) -> Callable[[], None]:
        if self.device.type != "cuda" or self.schedule.eager:
            return lambda: self._eager(bool(self.bfloat16))
        kinds = (False, True) if self.bfloat16 is None else (self.bfloat16,)
        graphs = [self._capture(kind) for kind in kinds]
        return max(graphs, key=lambda g: g[0])[1].replay

    def run(self, validate: Callable[[], str] | None = None) -> dict[str, float]:
        """Train until the schedule ends; the averaged weights are then in place. What was
        reached."""
        torch.backends.cuda.matmul.allow_tf32 = not self.exact_products
        torch.backends.cudnn.allow_tf32 = True
        go = self._runner()
        reported, last, bad = time.monotonic(), self.step, 0.0
        self.sums.zero_()
        numbers: dict[str, float] = {}
        self.ended = self._over()
        while not self.ended:
            for _ in range(min(self.block, self._left())):
                self._prepare()
                go()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self._meet()
            if self.after_block is not None:
                self.after_block(self.step)
            now = time.monotonic()
            if now - reported > self.every or self.ended:
                steps = self.step - last
                sums = (self.sums / steps).tolist()
                bad += sums[1] * steps
                numbers = {"loss": sums[0], **dict(zip(self.labels, sums[2:], strict=True))}
                shown = " ".join(f"{k} {v:.4f}" for k, v in numbers.items())
                extra = f" | {validate()}" if validate is not None else ""
                say(
                    self.name,
                    f"step {self.step} {steps / (now - reported):.1f}/s {shown} skipped "
                    f"{bad:.0f}{extra}",
                )
                self.sums.zero_()
                reported, last = time.monotonic(), self.step
        self.use_average()
        seconds = time.monotonic() - self.started
        return {"steps": self.step, "seconds": round(seconds, 1), "skipped": bad, **numbers}

    def _left(self) -> int:
        """Steps to go, if they are counted."""
        return (
            self.block if self.schedule.max_steps is None else self.schedule.max_steps - self.step
        )

    @torch.no_grad()
    def _meet(self) -> None:
        """Whether training ends. Processes of one `torchrun` take the mean of their weights, and
        end together."""
        self.ended = self._over()
        if not dist.is_initialized():
            return
        weights = [p.detach().flatten() for p in self.parameters]
        ended = torch.tensor([float(self.ended)], device=self.device)
        joined = torch.cat((*weights, ended))
        dist.all_reduce(joined)
        *means, ended = joined.split([*(len(w) for w in weights), 1])
        for p, mean in zip(self.parameters, means, strict=True):
            p.copy_(mean.view_as(p) / dist.get_world_size())
        self.ended = bool(ended > 0)

    def _over(self) -> bool:
        if self.schedule.max_steps is not None:
            return self.step >= self.schedule.max_steps
        return time.monotonic() - self.started > self.schedule.seconds

    @torch.no_grad()
    def use_average(self) -> None:
        for p, a in zip(self.averaged, self.average, strict=True):
            p.copy_(a)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their average: before and after a validation."""
        for p, a in zip(self.averaged, self.average, strict=True):
            kept = p.detach().clone()
            p.copy_(a)
            a.copy_(kept)


def device_of(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point())
