// A schema of zod, which the client sends as `output_config.format`.
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { ABOUT, MODEL, URL_, feature, isWheel } from "./rows.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: "unused", maxRetries: 0 });
const Wheel = z.object({
  kind: z.enum(["cart", "water", "potter"]),
  spokes: z.union([z.literal(4), z.literal(6), z.literal(8)]),
  turns: z.boolean(),
});

await feature("structured", async () => {
  const messages = [{ role: "user", content: ABOUT }];
  const wishes = { model: MODEL, max_tokens: 100, messages, output_config: { format: zodOutputFormat(Wheel) } };
  isWheel((await client.messages.parse(wishes)).parsed_output);
});
