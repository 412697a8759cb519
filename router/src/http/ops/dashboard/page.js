// The page: one document a second comes in and is shown. Nothing is asked for beside the stream but explanations and the chat.

import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { Bar, age, byId, count, element, figure, percent, setClass, setText, time } from "./dom.js";
import { Stream } from "./events.js";
import { Fleet } from "./fleet.js";
import { Placements } from "./placements.js";

const CLASSES = ["high", "normal", "low"];

const charts = {
  tokens: new Chart(byId("tokens"), ["output"], "tokens/s"),
  ttft: new Chart(byId("ttft"), ["p50", "p90", "p99"], "ms"),
  tpot: new Chart(byId("tpot"), ["p50", "p90", "p99"], "ms"),
  hits: new Chart(byId("hits"), ["hits"], "%", 1),
};
const kv = new Bar(["used", "cached"], "KV cache");
byId("kv-bar").append(kv.node);
const classes = CLASSES.map((name) => {
  const bar = new Bar(["used"], name);
  const number = element("span", { class: "n", text: "–" });
  byId("classes").append(element("span", { text: name }), bar.node, number);
  return { name, bar, number };
});

const fleet = new Fleet();
const chat = new Chat();
const stream = new Stream({ document: show, state: setState, wants_key: askForKey });
const placements = new Placements(() => stream.headers());

function setState(kind, text) {
  setClass(byId("state-dot"), `dot ${kind}`);
  setText(byId("state"), text);
}

function spread(chart, times) {
  const values = times ? [times.p50, times.p90, times.p99] : [null, null, null];
  const [shown, unit] = time(values[0]);
  const word = (ms) => time(ms).join(" ");
  chart.add(values, shown, times ? `${unit} median` : "ms median", times ? `p90 ${word(times.p90)}, p99 ${word(times.p99)}` : "none in the last minute");
}

function show(seen) {
  setState(seen.draining ? "draining" : seen.workers_ready ? "ready" : "suspect", seen.draining ? "draining" : seen.workers_ready ? "live" : "no worker is ready");
  setText(byId("workers"), `${count(seen.workers_ready)} of ${count(seen.workers_total)} workers ready`);
  setText(byId("uptime"), `up ${age(seen.uptime_s)}`);
  setText(byId("version"), `version ${seen.version}`);

  charts.tokens.add([seen.output_tokens_per_s], figure(seen.output_tokens_per_s), "tokens/s", `prompts ${figure(seen.prompt_tokens_per_s)} tokens/s`);
  spread(charts.ttft, seen.ttft_ms);
  spread(charts.tpot, seen.tpot_ms);
  charts.hits.add([seen.hit_rate], percent(seen.hit_rate), "of prompt tokens", "last minute");

  setText(byId("running"), count(seen.running));
  setText(byId("requests-rate"), figure(seen.requests_per_s));
  setText(byId("finished"), count(seen.finished));
  setText(byId("failed"), count(seen.failed));

  const { waiting, oldest_s: oldest } = seen.queue;
  setText(byId("waiting"), count(waiting));
  setText(byId("oldest"), waiting ? `oldest for ${age(oldest)}` : "");
  for (const { name, bar, number } of classes) {
    const ofClass = seen.queue.classes[name] ?? 0;
    bar.show([waiting ? ofClass / waiting : 0], `${count(ofClass)} waiting`);
    setText(number, count(ofClass));
  }

  const blocks = Math.max(seen.kv.blocks, 1);
  setText(byId("kv-share"), seen.kv.blocks ? percent(seen.kv.used / blocks) : "–");
  kv.show([seen.kv.used / blocks, seen.kv.cached / blocks], `${count(seen.kv.used)} of ${count(seen.kv.blocks)} blocks held, ${count(seen.kv.cached)} cached`);

  fleet.show(seen);
  placements.show(seen.decisions);
  chat.offer(seen.models);
}

// Comes back with a key typed. The form stays until one is right.
function askForKey(wasWrong) {
  const form = byId("key-form");
  form.hidden = false;
  byId("main").classList.add("closed");
  setText(byId("key-wrong"), wasWrong ? "this key does not open it" : "");
  byId("key").focus();
  return new Promise((typed) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      const key = byId("key").value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) {
        setText(byId("key-wrong"), "this key does not open it"); // no header could carry it
        return;
      }
      stream.key = key;
      form.hidden = true;
      byId("main").classList.remove("closed");
      typed();
    };
  });
}

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  setText(byId("theme"), `Theme: ${theme}`);
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("theme", next);
  setTheme(next);
});
setTheme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "system");
chat.begin();
stream.run();
