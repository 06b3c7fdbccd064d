// The server's HTTP interface: health, models, voices, and streamed chat and speech. All addresses are relative to the page, so that it
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

/** What the page needs to know of the first model. */
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
    description: first.description ?? "",
    ideas: first.ideas ?? [],
    inputs: first.input_modalities ?? ["text", "image"],
    reads: (first.output_modalities ?? ["text"]).includes("text") === false, // texts aloud, and answers nothing
    languages: first.languages ?? [],
    instructions: first.instructions ?? false,
    cloning: first.cloning ?? false,
    random: first.random_weights ?? false,
    stages: first.stages ?? {},
    maxBytes: first.max_body_bytes ?? 0,
  };
}

/** Names of the voices that this reader has made of clips. */
export async function ownVoices(key) {
  const response = await reach("v1/audio/voices", { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return ((await response.json()).data ?? []).filter((voice) => voice.created != null).map((voice) => voice.name);
}

/** {name, audio (base64), format, text}: make a voice of a clip. */
export async function addVoice(voice, key) {
  const response = await reach("v1/audio/voices", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(voice),
  });
  if (!response.ok) throw await failure(response);
}

export async function removeVoice(name, key) {
  const path = `v1/audio/voices/${encodeURIComponent(name)}`;
  const response = await reach(path, { method: "DELETE", headers: headers(key) });
  if (!response.ok) throw await failure(response);
}

/** The events of a text that is read aloud, in the form of a chat's. */
export async function* speech(body, key, signal) {
  for await (const event of events("v1/audio/speech", body, key, signal, (e) => e.type === "speech.audio.done")) {
    if (event.type === "speech.audio.delta") yield { choices: [{ delta: { audio: { data: event.audio } } }] };
    else yield { stretto: event.usage?.stretto };
  }
}

/** The events of a streamed chat completion, as parsed JSON, until "[DONE]". */
export const chat = (body, key, signal) => events("v1/chat/completions", body, key, signal, () => false);

async function* events(path, body, key, signal, isLast) {
  const response = await reach(path, {
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
    if (isLast(event)) return;
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
