// The OpenAI Agents SDK for JavaScript: an answer by the Responses API, a function, a realtime session.
import { Agent, OpenAIProvider, Runner, setTracingDisabled, tool } from "@openai/agents";
import { OpenAIRealtimeWebSocket, RealtimeAgent, RealtimeSession } from "@openai/agents/realtime";
import { z } from "zod";

const url = process.argv[2];
setTracingDisabled(true);

function check(fine, what) {
  if (!fine) throw new Error(what);
  console.log(`ok: ${what}`);
}

const runner = new Runner({ modelProvider: new OpenAIProvider({ baseURL: url, apiKey: "none" }), tracingDisabled: true });
const agent = new Agent({ name: "Helper", instructions: "Be brief.", model: "default" });
check((await runner.run(agent, "What is seven plus eight?")).finalOutput, "an agent answers");
const stream = await runner.run(agent, "Hello", { stream: true });
let words = "";
for await (const text of stream.toTextStream()) words += text;
check(words, "an agent answers, streamed");

let city;
const weather = tool({
  name: "weather",
  description: "How the weather is in a city.",
  parameters: z.object({ city: z.enum(["Bonn", "Rome"]) }),
  execute: async (given) => ((city = given.city), "It is sunny."),
});
const caller = new Agent({
  name: "Caller",
  model: "default",
  tools: [weather],
  modelSettings: { toolChoice: "required" },
});
await runner.run(caller, "How is the weather in Bonn?");
check(city !== undefined, "an agent calls a function and goes on");

const transport = new OpenAIRealtimeWebSocket({ url: url.replace("http", "ws") + "/realtime", apiKey: "none" });
const session = new RealtimeSession(new RealtimeAgent({ name: "Helper", instructions: "Be brief." }), { transport, tracingDisabled: true });
let size = 0;
const spoken = new Promise((resolve, reject) => {
  session.on("error", (e) => reject(new Error(JSON.stringify(e))));
  transport.on("audio", (e) => (size += e.data.byteLength));
  transport.on("turn_done", resolve);
});
await session.connect({ apiKey: "none", url: url.replace("http", "ws") + "/realtime" });
session.sendMessage("Hello");
await spoken;
session.close();
check(size > 4800, "a realtime session");
process.exit(0);
