// Workers as tiles, and the groups that some are ranks of.

import { Bar, Shelf, age, byId, count, element, figure, percent, setClass, setText, shortened } from "./dom.js";

const ROLES = { both: "prefill and decode", prefill: "prefill", decode: "decode" };

class Tile {
  constructor(id) {
    this.dot = element("span", { class: "dot" });
    this.state = element("span", { class: "word" });
    this.role = element("span", { class: "badge" });
    this.group = element("span", { class: "badge group" });
    this.mtp = element("span", { class: "badge", text: "MTP", title: "drafts tokens; tokens/step counts those accepted" });
    this.kv = new Bar(["used", "cached"], "KV pool");
    this.kvText = element("span");
    this.facts = {};
    const facts = [
      ["running", "running"],
      ["waiting", "waiting"],
      ["step", "step"],
      ["accepted", "tokens/step"],
    ].map(([name, label]) => {
      this.facts[name] = element("dd", { text: "–" });
      return element("div", {}, [element("dt", { text: label }), this.facts[name]]);
    });
    this.credit = element("p", { class: "credit" });
    this.node = element("article", { class: "tile" }, [
      element("header", {}, [this.dot, element("h3", { text: shortened(id, 26), title: id }), this.state]),
      element("p", { class: "badges" }, [this.role, this.mtp, this.group]),
      element("div", { class: "kv" }, [this.kv.node, this.kvText]),
      element("dl", {}, facts),
      this.credit,
    ]);
  }

  show(worker, severalModels) {
    const of = Math.max(worker.blocks, 1);
    const used = worker.blocks_used / of;
    setClass(this.dot, `dot ${worker.state}`);
    setText(this.state, worker.state === "ready" ? "" : worker.state);
    setText(this.role, (ROLES[worker.role] || worker.role) + (severalModels ? ` · ${shortened(worker.model, 16)}` : ""));
    this.group.hidden = !worker.group;
    if (worker.group) {
      const { id, rank, size } = worker.group;
      setText(this.group, `rank ${rank} of ${size} · ${shortened(id, 14)}`);
    }
    this.kv.show(
      [used, worker.blocks_cached / of],
      `${count(worker.blocks_used)} of ${count(worker.blocks)} blocks held, ${count(worker.blocks_cached)} cached`,
    );
    setText(this.kvText, percent(used));
    setText(this.facts.running, `${count(worker.running)}/${count(worker.sequences)}`);
    setText(this.facts.waiting, count(worker.waiting));
    setText(this.facts.step, worker.step_ms === null ? "–" : `${figure(worker.step_ms)} ms`);
    setText(this.facts.accepted, worker.accepted.toFixed(2));
    this.mtp.hidden = !worker.drafts && worker.accepted <= 1.005;
    const doubts = [
      worker.credit_withdrawn && `cache not believed: ${worker.credit_withdrawn.replaceAll("_", " ")}`,
      worker.speed_doubted && `speed not believed: ${worker.speed_doubted.replaceAll("_", " ")}`,
      worker.heard_ms > 5000 && `silent for ${age(worker.heard_ms / 1000)}`,
    ].filter(Boolean);
    setText(this.credit, doubts.length ? doubts.join("; ") : "credit: full");
    setClass(this.credit, doubts.length ? "credit lost" : "credit");
    setClass(this.node, `tile ${worker.state}${doubts.length ? " doubted" : ""}`);
  }
}

class Group {
  constructor(group) {
    this.text = element("span");
    this.node = element("p", { class: "group" }, [element("b", { text: shortened(group.id, 30), title: group.id }), this.text]);
  }

  show(group) {
    const whole = group.whole ? "" : ", not whole";
    setText(
      this.text,
      `${group.present} of ${group.size} ranks${whole} · skew ${percent(group.step_skew)} · waits ${percent(group.waited_share)}`,
    );
    setClass(this.node, group.whole ? "group" : "group lost");
  }
}

export class Fleet {
  constructor() {
    this.tiles = new Shelf(byId("fleet"), (worker) => new Tile(worker.id));
    this.groups = new Shelf(byId("groups"), (group) => new Group(group));
  }

  show(seen) {
    this.tiles.show(seen.workers, (worker) => worker.id, seen.models.length > 1);
    this.groups.show(seen.groups, (group) => `${group.model} ${group.id}`);
    const more = seen.workers_left_out ? `, ${count(seen.workers_left_out)} of them not shown` : "";
    const models = seen.models.map((name) => shortened(name, 40)).join(", ");
    const none = "no worker has joined yet";
    setText(byId("fleet-note"), seen.workers_total ? `${models}; ${count(seen.workers_total)} workers${more}` : none);
  }
}
