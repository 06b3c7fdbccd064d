// OpenAI's client for JavaScript: chat, responses, speech, and a realtime session over TLS.
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none" });
const messages = [{ role: "user", content: "What is seven plus eight?" }];

function check(fine, what) {
  if (!fine) throw new Error(what);
  console.log(`ok: ${what}`);
}

const told = await client.chat.completions.create({ model: "default", messages });
check(told.choices[0].message.content, "chat");
let words = "";
for await (const c of await client.chat.completions.create({ model: "default", messages, stream: true }))
  words += c.choices[0]?.delta?.content ?? "";
check(words, "chat, streamed");
check((await client.responses.create({ model: "default", input: "Hello" })).output_text, "responses");
const spoken = await client.audio.speech.create({ model: "default", voice: "alloy", input: "Hello there.", response_format: "pcm" });
check((await spoken.arrayBuffer()).byteLength > 4800, "speech");

const realtime = new OpenAIRealtimeWS({ model: "default" }, client);
let size = 0;
const done = await new Promise((resolve, reject) => {
  realtime.on("error", reject);
  realtime.on("response.output_audio.delta", (e) => (size += e.delta.length));
  realtime.on("response.done", resolve);
  realtime.on("session.created", () => {
    const item = { type: "message", role: "user", content: [{ type: "input_text", text: "Hello" }] };
    realtime.send({ type: "conversation.item.create", item });
    realtime.send({ type: "response.create" });
  });
});
realtime.close();
check(done.response.status === "completed" && size > 4800, "realtime, over TLS");
