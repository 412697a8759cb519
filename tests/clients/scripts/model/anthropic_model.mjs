// A schema of zod, which the client sends as `output_config.format`, whole and streamed; a tool that has to be called; an agent
// whose turns are streamed and all have to be calls, up to the one that reports.
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { ABOUT, MODEL, URL_, feature, isWheel, same } from "./rows.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: "unused", maxRetries: 0 });
const Wheel = z.object({
  kind: z.enum(["cart", "water", "potter"]),
  spokes: z.union([z.literal(4), z.literal(6), z.literal(8)]),
  turns: z.boolean(),
});

await feature("structured", async () => {
  const messages = [{ role: "user", content: ABOUT }];
  const common = { model: MODEL, max_tokens: 100, temperature: 0, messages };
  const wishes = { ...common, output_config: { format: zodOutputFormat(Wheel) } };
  isWheel((await client.messages.parse(wishes)).parsed_output);
  isWheel((await client.messages.stream(wishes).finalMessage()).parsed_output);
  const input_schema = z.toJSONSchema(Wheel);
  const tools = [{ name: "report", description: "Reports a wheel.", input_schema }];
  const tool_choice = { type: "tool", name: "report" };
  const called = await client.messages.create({ ...common, tools, tool_choice });
  isWheel(called.content[0].input);
});

const city = { type: "string", maxLength: 30 };
const degrees = { type: "integer", minimum: -50, maximum: 50 };
const named = (name, description, properties) => ({
  name,
  description,
  input_schema: { type: "object", properties, required: Object.keys(properties) },
});

await feature("agent", async () => {
  const tools = [
    named("get_weather", "The weather of a city now.", { city }),
    named("report", "The final answer to the user.", { city, degrees }),
  ];
  const tool_choice = { type: "any", disable_parallel_tool_use: true };
  const messages = [{ role: "user", content: "Get the weather in Paris, then report it." }];
  const calls = [];
  while (calls.at(-1)?.name !== "report") {
    if (calls.length === 6) throw new Error(JSON.stringify(calls));
    const wishes = { model: MODEL, max_tokens: 120, temperature: 0, messages, tools, tool_choice };
    const { content, stop_reason } = await client.messages.stream(wishes).finalMessage();
    same(stop_reason, "tool_use");
    const call = content.find((block) => block.type === "tool_use");
    calls.push(call);
    const text = `It is 21 degrees in ${call.input.city}. Report it with the function report.`;
    messages.push({ role: "assistant", content });
    messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: text }] });
  }
  same(calls[0].name, "get_weather");
  same(calls.at(-1).input.degrees, 21);
});
