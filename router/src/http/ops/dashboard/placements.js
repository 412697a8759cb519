// The last placements: what was predicted beside what happened, and why one went where it went.

import { Shelf, age, byId, count, element, figure, setClass, setText, shortened } from "./dom.js";

const PARTS = ["queue", "prefill", "transfer", "decode", "interference", "saturation"];

// A figure that was predicted, and what it came to.
class Pair {
  constructor() {
    this.expected = element("span", { class: "expected" });
    this.real = element("span", { class: "real" });
    this.node = element("td", { class: "n" }, [this.expected, this.real]);
  }

  show(expected, real, over, said = figure) {
    setText(this.expected, said(expected));
    setText(this.real, said(real));
    setClass(this.real, `real ${over ? judged(expected, real) : ""}`);
  }
}

class Row {
  constructor(decision, explain) {
    const cell = (kind) => element("td", { class: kind });
    this.age = cell("dim");
    this.worker = cell("who");
    this.prompt = cell("n");
    this.cached = new Pair();
    this.first = new Pair();
    this.rest = new Pair();
    this.tokens = cell("n");
    this.outcome = element("span");
    const name = element("button", { class: "link", type: "button", title: decision.request, text: shortened(decision.request, 24) });
    this.node = element("tr", {}, [
      ...[this.age, element("td", {}, [name]), this.worker, this.prompt],
      ...[this.cached.node, this.first.node, this.rest.node, this.tokens],
      element("td", {}, [this.outcome]),
    ]);
    this.node.addEventListener("click", explain);
  }

  show({ age_s: seconds, worker, prefill, prompt_tokens: prompt, predicted, actual }) {
    const where = prefill ? `${prefill} → ${worker}` : worker || "waits";
    setText(this.age, age(seconds));
    setText(this.worker, shortened(where, 34));
    if (this.worker.title !== where) this.worker.title = where;
    setText(this.prompt, count(prompt));
    this.cached.show(predicted?.cached_tokens, actual.cached_tokens, false, count);
    this.first.show(predicted?.first_token_ms, actual.first_token_ms, true);
    this.rest.show(predicted?.decode_ms, actual.decode_ms, actual.outcome === "finished");
    setText(this.tokens, count(actual.output_tokens));
    setText(this.outcome, said(actual));
    setClass(this.outcome, `outcome ${actual.outcome}`);
  }
}

export class Placements {
  constructor(headers) {
    this.headers = headers;
    this.rows = new Shelf(byId("decisions"), (decision) => new Row(decision, () => this.explain(decision.request)));
    this.none = byId("decisions-none");
    this.dialog = byId("explanation");
    byId("explanation-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside it
    });
  }

  show(decisions) {
    this.rows.show(decisions, (decision) => `${decision.request} ${decision.at_ms}`);
    this.none.hidden = decisions.length > 0;
  }

  async explain(request) {
    const body = byId("explanation-body");
    setText(byId("explanation-title"), shortened(request, 60));
    body.replaceChildren(element("p", { class: "note", text: "asking" }));
    if (!this.dialog.open) this.dialog.showModal();
    try {
      const path = `decisions/${encodeURIComponent(request)}`;
      const answer = await fetch(path, { headers: this.headers(), cache: "no-store" });
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error?.message || `status ${answer.status}`);
      body.replaceChildren(...found.decisions.flatMap((one, i) => explained(one, i, found.decisions.length)), legend(found.words));
    } catch (error) {
      body.replaceChildren(element("p", { class: "wrong", text: error.message }));
    }
  }
}

// Far off is more than twice, or less than half, where it makes more than 50 ms.
function judged(expected, real) {
  if (typeof expected !== "number" || typeof real !== "number" || Math.abs(real - expected) < 50) return "";
  return real > 2 * expected ? "over" : real < expected / 2 ? "under" : "";
}

function said(actual) {
  const why = actual.finish_reason || actual.error;
  return why ? `${actual.outcome} (${why.replaceAll("_", " ")})` : actual.outcome;
}

function explained(decision, i, all) {
  const chosen = decision.prefill ? `${decision.prefill} for the prompt and ${decision.winner} for the answer` : decision.winner;
  const which = all > 1 ? `Placement ${i + 1} of ${all}: ` : "";
  const ask = `${count(decision.prompt_tokens)} prompt tokens, about ${count(decision.output_tokens)} of at most ${count(decision.max_tokens)} to generate.`;
  const nodes = [
    element("p", { class: "said", text: `${which}${decision.policy} chose ${chosen || "to wait"}. ${ask}` }),
    element("p", { class: "note", text: `${said(decision.actual)}, after ${figure(decision.actual.waited_ms)} ms in the queue` }),
  ];
  const candidates = [...decision.candidates];
  if (decision.pair) {
    const { prefill, decode } = decision.pair;
    const from = candidates.find((one) => one.worker === prefill);
    candidates.push({ ...decision.pair, worker: `${prefill} → ${decode}`, role: "pair", cached_tokens: from?.cached_tokens, excluded: null });
  }
  const winner = decision.prefill ? `${decision.prefill} → ${decision.winner}` : decision.winner;
  candidates.sort((a, b) => (a.excluded !== null) - (b.excluded !== null) || a.total_ms - b.total_ms);
  const most = Math.max(1e-9, ...candidates.map((one) => one.total_ms));
  const head = ["", "worker", "cached", ...PARTS, "total, ms", "", ""].map((text, at) => element("th", { class: at > 1 && at < 10 ? "n" : "", text }));
  const rows = candidates.map((one) => {
    const parts = PARTS.map((part) => {
      const piece = element("i", { class: part });
      piece.style.width = `${(100 * Math.max(one[`${part}_ms`], 0)) / most}%`;
      return piece;
    });
    return element("tr", { class: one.worker === winner ? "winner" : one.excluded ? "excluded" : "" }, [
      element("td", { text: one.worker === winner ? "→" : "" }),
      element("td", { class: "who", text: shortened(one.worker, 34), title: one.worker }),
      element("td", { class: "n", text: count(one.cached_tokens) }),
      ...PARTS.map((part) => element("td", { class: "n", text: figure(one[`${part}_ms`]) })),
      element("td", { class: "n total", text: figure(one.total_ms) }),
      element("td", { class: "cost" }, [element("div", { class: "bar" }, parts)]),
      element("td", { class: "dim", text: (one.excluded || "").replaceAll("_", " ") }),
    ]);
  });
  nodes.push(
    element("div", { class: "scroll" }, [
      element("table", { class: "candidates" }, [element("thead", {}, [element("tr", {}, head)]), element("tbody", {}, rows)]),
    ]),
  );
  if (decision.left_out) {
    nodes.push(element("p", { class: "note", text: `${count(decision.left_out.candidates)} more workers are not shown; X-Headrace-Explain shows all` }));
  }
  return nodes;
}

function legend(words) {
  const meant = Object.entries(words?.predicted || {}).filter(([name]) => PARTS.some((part) => name === `${part}_ms`));
  return element(
    "dl",
    { class: "words" },
    meant.flatMap(([name, meaning]) => {
      const part = name.replace("_ms", "");
      return [element("dt", { class: `key ${part}`, text: part }), element("dd", { text: meaning })];
    }),
  );
}
