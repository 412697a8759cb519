// What a script of a client says: one JSON row for each feature that it tried.
export const URL_ = process.env.HEADRACE_URL;
export const MODEL = process.env.HEADRACE_MODEL;
export const HELLO = "Hello there, how are you today?";

export async function feature(name, test) {
  const row = { feature: name, result: "pass", detail: "" };
  try {
    await test();
  } catch (error) {
    row.result = "fail";
    row.detail = String(error).slice(0, 300);
    console.error(error);
  }
  console.log(JSON.stringify(row));
}

export function same(got, want) {
  if (got !== want) throw new Error(`${JSON.stringify(got)} is not ${JSON.stringify(want)}`);
}

// As in rows.py: a model that may say anything answers this in words.
export const ABOUT = "Tell me about a wheel.";
const WHEEL = { kind: ["cart", "water", "potter"], spokes: [4, 6, 8], turns: [true, false] };

export function isWheel(value) {
  same(Object.keys(value).sort().join(), Object.keys(WHEEL).sort().join());
  for (const [name, values] of Object.entries(WHEEL)) same(values.includes(value[name]), true);
}
