// The stream of documents, one a second. `fetch` rather than EventSource, which sends no key.

const AGAIN_MS = 1000;
const FULL_MS = 5000;
const SILENT_MS = 15000; // a connection that lost its other end says nothing about it

export class Stream {
  constructor(handlers) {
    this.handlers = handlers; // document, state, wants_key
    this.key = "";
  }

  headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  // Runs for ever: a stream that ends is asked for again.
  async run() {
    for (;;) {
      let pause = AGAIN_MS;
      try {
        pause = await this.follow();
      } catch {
        this.handlers.state("lost", "no connection, trying again");
      }
      await new Promise((done) => setTimeout(done, pause));
    }
  }

  async follow() {
    const ends = new AbortController();
    let silent = setTimeout(() => ends.abort(), SILENT_MS);
    try {
      const headers = this.headers();
      const answer = await fetch("dashboard/events", { headers, signal: ends.signal, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        clearTimeout(silent);
        this.handlers.state("lost", "for operators");
        await this.handlers.wants_key(Boolean(this.key));
        return 0;
      }
      if (!answer.ok) {
        this.handlers.state("lost", answer.status === 429 ? "too many pages are open" : `status ${answer.status}`);
        return FULL_MS;
      }
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return 0;
        clearTimeout(silent);
        silent = setTimeout(() => ends.abort(), SILENT_MS);
        text += value;
        const events = text.split("\n\n");
        text = events.pop();
        // of several that came together the last one is enough
        const last = events.pop();
        if (last !== undefined && last.startsWith("data: ")) this.handlers.document(JSON.parse(last.slice(6)));
      }
    } finally {
      clearTimeout(silent);
    }
  }
}
