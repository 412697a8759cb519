import Anthropic from "@anthropic-ai/sdk";
import { HELLO, MODEL, URL_, feature, same } from "./rows.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: "unused", maxRetries: 0 });
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "get_weather", description: "d", input_schema }];
const ask = (content, more = {}) => ({
  model: MODEL,
  max_tokens: 200,
  messages: [{ role: "user", content }],
  ...more,
});
const call = (message) => message.content.find((block) => block.type === "tool_use");

await feature("messages", async () => {
  const answer = await client.messages.create(ask("Hi"));
  same(answer.content[0].text, HELLO);
  same(answer.stop_reason, "end_turn");
});
await feature("stream", async () => same(await client.messages.stream(ask("Hi")).finalText(), HELLO));
await feature("tools", async () => {
  const answer = await client.messages.create(ask("What is the weather in Basel?", { tools }));
  same(call(answer).input.city, "Basel");
  same(answer.stop_reason, "tool_use");
});
await feature("tools stream", async () => {
  const answer = await client.messages.stream(ask("What is the weather in Basel?", { tools })).finalMessage();
  same(call(answer).input.city, "Basel");
});
await feature("reasoning", async () => {
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const answer = await client.messages.create(ask("Think first", { max_tokens: 2000, thinking }));
  same(answer.content.map((block) => block.type).join(), "thinking,text");
});
await feature("errors", async () => {
  const wrong = client.messages.create(ask("Hi", { model: "other" }));
  same(await wrong.then(() => 200, (error) => error.status), 404);
});
