// A conversation with a model that is served, as any client would have it. Its key is the one that is typed; it is kept in
// this page alone.

import { byId, element, figure, setText } from "./dom.js";

const MOST_MESSAGES = 100;

export class Chat {
  constructor() {
    this.messages = [];
    this.list = byId("messages");
    this.running = null;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send();
    });
    byId("chat-clear").addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      this.list.replaceChildren();
    });
  }

  headers() {
    const key = byId("chat-key").value.trim();
    return key ? { Authorization: `Bearer ${key}` } : {};
  }

  // An address of operators serves no clients: then there is nobody to talk to.
  async begin() {
    const answer = await fetch("v1/models", { headers: this.headers() }).catch(() => null);
    const here = answer !== null && answer.status !== 404;
    byId("chat").hidden = !here;
    setText(byId("chat-note"), here ? "an ordinary request, by this page's address" : "not at this address, which serves operators alone; open this page where clients are served");
  }

  offer(models) {
    const select = byId("chat-model");
    const shown = [...select.options].map((one) => one.value);
    if (shown.length === models.length && shown.every((name, i) => name === models[i])) return;
    const chosen = select.value;
    select.replaceChildren(...models.map((name) => element("option", { value: name, text: name })));
    if (models.includes(chosen)) select.value = chosen;
  }

  bubble(who, text) {
    const words = element("p", { class: "words", text });
    const note = element("p", { class: "note" });
    this.list.append(element("div", { class: `message ${who}` }, [words, note]));
    this.list.scrollTop = this.list.scrollHeight;
    return { words, note };
  }

  async send() {
    const box = byId("chat-text");
    const text = box.value.trim();
    if (!text) return;
    box.value = "";
    // kept once it is answered: templates want questions and answers in turns
    const turn = [...this.messages.slice(-(MOST_MESSAGES - 2)), { role: "user", content: text }];
    this.bubble("user", text);
    const { words, note } = this.bubble("assistant", "");
    const running = (this.running = new AbortController());
    setText(byId("chat-send"), "Stop");
    try {
      const said = await this.answer(turn, words, note);
      if (!running.signal.aborted) this.messages = [...turn, { role: "assistant", content: said }];
    } catch (error) {
      words.closest(".message").classList.add("failed");
      setText(note, error.name === "AbortError" ? "stopped" : error.message);
    } finally {
      this.running = null;
      setText(byId("chat-send"), "Send");
    }
  }

  async answer(turn, words, note) {
    const began = performance.now();
    const body = { model: byId("chat-model").value, messages: turn, stream: true, stream_options: { include_usage: true } };
    const answer = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify(body),
      signal: this.running.signal,
    });
    if (!answer.ok) {
      const { error } = await answer.json().catch(() => ({}));
      throw new Error(error?.message || `status ${answer.status}`);
    }
    const worker = answer.headers.get("x-headrace-worker");
    let first = null;
    let usage = null;
    let said = "";
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      const delta = event.choices?.[0]?.delta || {};
      const piece = (delta.reasoning_content || "") + (delta.content || "");
      if (!piece) continue;
      first ??= performance.now() - began;
      said += piece;
      const text = words.firstChild || words.appendChild(document.createTextNode(""));
      text.appendData(piece);
      this.list.scrollTop = this.list.scrollHeight;
    }
    const took = (performance.now() - began - (first ?? 0)) / 1000;
    const tokens = usage?.completion_tokens ?? 0;
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const rate = tokens > 1 && took > 0 ? ` · ${figure((tokens - 1) / took)} tokens/s` : "";
    setText(note, `first token after ${figure(first)} ms${rate} · ${cached} of ${usage?.prompt_tokens ?? 0} prompt tokens cached${worker ? ` · ${worker}` : ""}`);
    return said;
  }
}

// Objects of a stream of events, up to [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const event of whole) {
      const line = event.split("\n").find((one) => one.startsWith("data: "));
      if (line === "data: [DONE]") return;
      if (line) yield JSON.parse(line.slice(6));
    }
  }
}
