import OpenAI from "openai";
import { HELLO, MODEL, URL_, feature, same } from "./rows.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: "unused", maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "d", parameters } }];

await feature("chat", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages: user("Hi") });
  same(answer.choices[0].message.content, HELLO);
});
await feature("stream", async () => {
  let text = "";
  const events = await client.chat.completions.create({ model: MODEL, messages: user("Hi"), stream: true });
  for await (const event of events) text += event.choices[0]?.delta?.content ?? "";
  same(text, HELLO);
});
await feature("tools", async () => {
  const messages = user("What is the weather in Basel?");
  const answer = await client.chat.completions.create({ model: MODEL, messages, tools });
  same(answer.choices[0].message.tool_calls[0].function.name, "get_weather");
});
await feature("tools stream", async () => {
  const messages = user("What is the weather in Basel?");
  const answer = await client.chat.completions.stream({ model: MODEL, messages, tools }).finalChatCompletion();
  same(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments).city, "Basel");
});
await feature("responses", async () => {
  const answer = await client.responses.create({ model: MODEL, input: "Hi" });
  same(answer.output_text, HELLO);
});
await feature("embeddings", async () => {
  const answer = await client.embeddings.create({ model: MODEL, input: ["a wheel", "a river"] });
  same(answer.data.map((item) => item.embedding.length).join(), "64,64");
});
await feature("errors", async () => {
  const wrong = client.chat.completions.create({ model: "other", messages: user("Hi") });
  same(await wrong.then(() => 200, (error) => error.status), 404);
});
