// A schema of zod as the format of an answer, and as arguments of a function that has to be called.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ABOUT, MODEL, URL_, feature, isWheel } from "./rows.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: "unused", maxRetries: 0 });
const Wheel = z.object({
  kind: z.enum(["cart", "water", "potter"]),
  spokes: z.union([z.literal(4), z.literal(6), z.literal(8)]),
  turns: z.boolean(),
});

await feature("structured", async () => {
  const messages = [{ role: "user", content: ABOUT }];
  const common = { model: MODEL, messages, temperature: 0, max_tokens: 100 };
  const format = zodResponseFormat(Wheel, "wheel");
  const answer = await client.chat.completions.parse({ ...common, response_format: format });
  isWheel(answer.choices[0].message.parsed);
  const tools = [zodFunction({ name: "report", parameters: Wheel })];
  const called = await client.chat.completions.parse({ ...common, tools, tool_choice: "required", parallel_tool_calls: false });
  isWheel(called.choices[0].message.tool_calls[0].function.parsed_arguments);
});
