// The server's HTTP interface: health, models, and streamed chat. All addresses are relative to the page, so that it
// works behind a proxy's prefix.

const at = (path) => new URL(path, document.baseURI);

/** The server answered, but not with what was asked for. */
export class ApiError extends Error {
  constructor(message, { status = 0, kind = "", param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, kind, param, retryAfter });
  }
}

/** The server could not be reached, or the connection broke. */
export class Unreachable extends Error {}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function reach(path, options) {
  try {
    return await fetch(at(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The server cannot be reached.");
  }
}

/** What `Retry-After` asks for, in seconds: a number or a date. */
function retryAfter(response) {
  const value = response.headers.get("Retry-After");
  if (!value) return null;
  const seconds = /^\d+(\.\d+)?$/.test(value.trim()) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, seconds) : null;
}

async function failure(response) {
  const body = await response.json().catch(() => ({}));
  const told = typeof body.error === "string" ? { message: body.error } : (body.error ?? {});
  return new ApiError(told.message || body.detail || `The server answered ${response.status}.`, {
    status: response.status,
    kind: told.type,
    param: told.param ?? null,
    retryAfter: retryAfter(response),
  });
}

/** {state, stages, error}: "ready" or what the server is busy with; "error" if it is no such answer at all. */
export async function health(signal) {
  const response = await reach("health", { signal, cache: "no-store" });
  const body = await response.json().catch(() => ({}));
  const said = body.state ?? body.status;
  const state = response.ok ? "ready" : ["loading", "draining", "dead"].includes(said) ? said : "error";
  const error = body.error?.message ?? body.error ?? (state === "error" ? `It answered ${response.status}.` : null);
  return { state, stages: body.stages ?? {}, error };
}

/** {name, voices, defaultVoice, rate} of the first model. */
export async function model(key) {
  const response = await reach("v1/models", { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await failure(response);
  const first = (await response.json()).data?.[0];
  if (!first) throw new ApiError("The server offers no model.");
  const voices = (first.voices ?? []).map((v) => (typeof v === "string" ? v : (v.id ?? v.name)));
  return {
    name: first.id,
    voices,
    defaultVoice: first.default_voice ?? voices[0] ?? null,
    rate: first.sample_rate ?? 24000,
  };
}

/** The events of a streamed chat completion, as parsed JSON, until "[DONE]". */
export async function* chat(body, key, signal) {
  const response = await reach("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) {
      throw new ApiError(event.error.message ?? "The answer failed.", { status: 500, kind: event.error.type });
    }
    yield event;
  }
  throw new Unreachable("The connection broke before the answer was complete.");
}

/** The `data` of each server-sent event in a stream of bytes. */
export async function* serverSentEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The connection broke before the answer was complete.");
  } finally {
    reader.releaseLock();
  }
}
