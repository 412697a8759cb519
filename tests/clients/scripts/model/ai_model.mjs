// A schema of zod as the output of an answer, whole and streamed, and as input of a tool that has to be called.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { ABOUT, MODEL, URL_, feature, isWheel } from "./rows.mjs";

const provider = createOpenAICompatible({
  name: "headrace",
  baseURL: `${URL_}/v1`,
  apiKey: "unused",
  supportsStructuredOutputs: true,
});
const schema = z.object({
  kind: z.enum(["cart", "water", "potter"]),
  spokes: z.union([z.literal(4), z.literal(6), z.literal(8)]),
  turns: z.boolean(),
});
const common = { model: provider(MODEL), prompt: ABOUT, maxRetries: 0, temperature: 0, maxOutputTokens: 100 };

await feature("structured", async () => {
  const output = Output.object({ schema });
  isWheel((await generateText({ ...common, output })).output);
  isWheel(await streamText({ ...common, output }).output);
  const tools = { report: tool({ description: "Reports a wheel.", inputSchema: schema }) };
  const called = await generateText({ ...common, tools, toolChoice: "required" });
  isWheel(called.toolCalls[0].input);
});
