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
