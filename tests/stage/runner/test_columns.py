"""What a request asks of its logits ends with it: the next one on its row has none of it."""

import torch

from stretto.stage.runner.columns import BiasColumns


def test_a_row_forgets_the_biases_of_its_last_request() -> None:
    bias = BiasColumns(3, 8, torch.device("cpu"), fused=False)
    bias.write(1, [(4, 2.0), (5, -3.0)])
    bias.write(2, [(0, 7.0)])
    bias.write(1, [(6, 1.0)])  # fewer than before
    logits = torch.zeros(2, 9)
    bias.add(logits, torch.tensor([1, 2]))
    assert logits[0].tolist() == [0.0] * 6 + [1.0, 0.0, 0.0]
    assert logits[1].tolist() == [7.0] + [0.0] * 8
    bias.write(1, [])  # none, while another row has some
    logits = torch.zeros(2, 9)
    bias.add(logits, torch.tensor([1, 2]))
    assert not logits[0].any()
    assert logits[1, 0] == 7.0
