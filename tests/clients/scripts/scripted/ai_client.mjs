import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { HELLO, MODEL, URL_, feature, same } from "./rows.mjs";

const provider = createOpenAICompatible({
  name: "headrace",
  baseURL: `${URL_}/v1`,
  apiKey: "unused",
  supportsStructuredOutputs: true,
});
const model = provider(MODEL);
const common = { model, maxRetries: 0 };
const tools = {
  get_weather: tool({
    description: "d",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => "It is 21 degrees",
  }),
};

await feature("chat", async () => same((await generateText({ ...common, prompt: "Hi" })).text, HELLO));
await feature("stream", async () => same(await streamText({ ...common, prompt: "Hi" }).text, HELLO));
await feature("tools", async () => {
  const stopWhen = stepCountIs(3);
  const answer = await generateText({ ...common, prompt: "What is the weather in Basel?", tools, stopWhen });
  same(answer.text, "It is 21 degrees in Basel.");
});
await feature("tools stream", async () => {
  const answer = streamText({ ...common, prompt: "What is the weather in Basel?", tools });
  same((await answer.toolCalls)[0].input.city, "Basel");
});
await feature("reasoning", async () => {
  const answer = await generateText({ ...common, prompt: "Think first" });
  same(answer.text.trim(), "It is 42.");
  same(answer.reasoningText.includes("Seven"), true);
});
await feature("errors", async () => {
  const wrong = generateText({ ...common, model: provider("other"), prompt: "Hi" });
  same(await wrong.then(() => 200, (error) => error.statusCode), 404);
});
