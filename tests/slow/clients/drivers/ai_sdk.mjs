// Vercel's AI SDK with @ai-sdk/openai, whose default is the Responses API.
import { createOpenAI } from "@ai-sdk/openai";
import * as ai from "ai";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";

const openai = createOpenAI({ baseURL: process.argv[2], apiKey: "none" });
const prompt = "What is seven plus eight?";

function check(fine, what) {
  if (!fine) throw new Error(what);
  console.log(`ok: ${what}`);
}

check((await generateText({ model: openai("default"), prompt })).text, "generateText");
let words = "";
for await (const text of streamText({ model: openai("default"), prompt }).textStream) words += text;
check(words, "streamText");
check((await generateText({ model: openai.chat("default"), prompt })).text, "generateText by chat");

const schema = jsonSchema({
  type: "object",
  properties: { answer: { type: "string", enum: ["fifteen", "sixteen"] } },
  required: ["answer"],
  additionalProperties: false,
});
const made = await generateText({ model: openai("default"), prompt, output: Output.object({ schema }) });
check(typeof made.output.answer === "string", "structured output");

let city;
const weather = tool({
  description: "How the weather is in a city.",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string", enum: ["Bonn", "Rome"] } }, required: ["city"], additionalProperties: false }),
  execute: async (given) => ((city = given.city), "It is sunny."),
});
await generateText({ model: openai("default"), prompt: "Weather in Bonn?", tools: { weather }, toolChoice: "required" });
check(city !== undefined, "a function is called");

const speak = ai.generateSpeech ?? ai.experimental_generateSpeech;  // it is about to lose its prefix
const { audio } = await speak({ model: openai.speech("default"), text: "Hello there.", voice: "alloy" });
check(audio.uint8Array.byteLength > 1000, "speech");
