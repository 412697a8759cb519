// Shows openapi.json of this server. Everything that the document says becomes text, never markup.
"use strict";

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

class Page {
  constructor(api) {
    this.api = api;
  }

  // What a reference stands for, and the last part of its name.
  resolve(schema) {
    if (!schema || !schema.$ref) return [schema || {}, null];
    const parts = schema.$ref.slice(2).split("/");
    const found = parts.reduce((at, part) => (at || {})[part], this.api);
    return [found || {}, parts[parts.length - 1]];
  }

  // A schema in a few words.
  type(schema) {
    const [found, name] = this.resolve(schema);
    if (name) return name;
    if ("const" in found) return JSON.stringify(found.const);
    if (found.enum) return found.enum.map((word) => JSON.stringify(word)).join(" | ");
    const several = found.anyOf || found.oneOf;
    if (several) return [...new Set(several.map((one) => this.type(one)))].join(" | ");
    if (found.type === "array" || (Array.isArray(found.type) && found.type.includes("array"))) {
      return `array of ${this.type(found.items)}`;
    }
    const kind = Array.isArray(found.type) ? found.type.join(" | ") : found.type || "any";
    return kind + this.range(found);
  }

  range(schema) {
    const least = schema.exclusiveMinimum !== undefined ? `above ${schema.exclusiveMinimum}` : schema.minimum;
    if (least === undefined && schema.maximum === undefined) return "";
    if (Math.abs(schema.maximum) > 9e15) return "";
    return schema.maximum === undefined ? `, from ${least}` : `, ${least} to ${schema.maximum}`;
  }

  // The object with properties that a schema is, or holds; null where there is none.
  object(schema, depth = 0) {
    const [found, name] = this.resolve(schema);
    if (depth > 4) return null;
    if (found.properties) return [found, name];
    const inside = [...(found.anyOf || []), ...(found.oneOf || []), found.items].filter(Boolean);
    for (const one of inside) {
      const object = this.object(one, depth + 1);
      if (object) return object;
    }
    return null;
  }

  fields(schema, seen) {
    const table = element("table", { class: "fields" });
    for (const [name, property] of Object.entries(schema.properties)) {
      const required = (schema.required || []).includes(name);
      const object = this.object(property);
      const cell = element("td", {}, element("span", { class: "type" }, this.type(property)));
      const about = property.description || this.resolve(property)[0].description;
      if (about) cell.append(element("p", {}, about));
      if (object && !seen.includes(object[0])) cell.append(this.inner(object, seen));
      table.append(element("tr", {},
        element("td", {}, element("code", {}, name), required ? element("span", { class: "required" }, " required") : null),
        cell));
    }
    return table;
  }

  // Written once it is opened: documents refer to themselves.
  inner([schema, name], seen) {
    const details = element("details", { class: "inner" }, element("summary", {}, name || "fields"));
    details.addEventListener("toggle", () => details.append(this.fields(schema, [...seen, schema])), { once: true });
    return details;
  }

  media(content) {
    const parts = element("div");
    for (const [media, { schema, "x-event": event }] of Object.entries(content || {})) {
      parts.append(element("p", {}, element("code", {}, media), " ", element("span", { class: "type" }, this.type(schema))));
      const [found] = this.resolve(schema);
      if (found.description) parts.append(element("p", {}, found.description));
      const object = this.object(event || schema);
      if (object) parts.append(this.inner(object, []));
    }
    return parts;
  }

  who(operation) {
    const named = (operation.security || []).flatMap((one) => Object.keys(one));
    return named.length ? `${[...new Set(named)].join(" or ")} key` : "everybody";
  }

  example(path, method, operation) {
    const url = new URL(path.slice(1).replace(/[{]/g, "").replace(/[}]/g, ""), document.baseURI);
    const lines = [`curl -s ${url}`];
    const key = (operation.security || []).some((one) => Object.keys(one).length);
    if (key) lines.push('  -H "Authorization: Bearer $KEY"');
    if (method === "post") {
      const schema = operation.requestBody.content["application/json"].schema;
      lines.push("  -H 'Content-Type: application/json'", `  -d '${JSON.stringify(this.sample(schema, 0))}'`);
    }
    return element("pre", {}, lines.join(" \\\n"));
  }

  // The least that a schema asks for.
  sample(schema, depth) {
    const [found] = this.resolve(schema);
    if (depth > 5) return {};
    if ("const" in found) return found.const;
    if (found.enum) return found.enum.includes("user") ? "user" : found.enum[0];
    if (found.anyOf) return this.sample(found.anyOf[0], depth + 1);
    const kind = Array.isArray(found.type) ? found.type[0] : found.type;
    if (kind === "array") return [this.sample(found.items, depth + 1)];
    if (kind === "integer" || kind === "number") return found.minimum > 0 ? found.minimum : 0;
    if (kind === "boolean") return false;
    if (kind !== "object") return "...";
    const names = (found.required || []).slice();
    if (found.properties && "content" in found.properties && !names.includes("content")) names.push("content");
    return Object.fromEntries(names.map((name) => [name, this.sample(found.properties[name], depth + 1)]));
  }

  operation(path, method, operation) {
    const body = element("div");
    const details = element("details", { class: "operation", id: operation.operationId },
      element("summary", {},
        element("span", { class: `method ${method}` }, method),
        element("code", {}, path),
        element("span", {}, operation.summary),
        element("span", { class: "who" }, this.who(operation))),
      body);
    const fill = () => {
      const parameters = operation.parameters || [];
      if (parameters.length) {
        body.append(element("h3", {}, "Parameters"));
        const properties = Object.fromEntries(parameters.map((one) =>
          [one.name, { ...one.schema, description: `${one.in}. ${one.description || ""}` }]));
        const required = parameters.filter((one) => one.required).map((one) => one.name);
        body.append(this.fields({ properties, required }, []));
      }
      if (operation.requestBody) {
        const [schema] = this.resolve(operation.requestBody.content["application/json"].schema);
        body.append(element("h3", {}, "Body"));
        if (schema.description) body.append(element("p", {}, schema.description));
        if (schema.properties) body.append(this.fields(schema, [schema]));
      }
      body.append(element("h3", {}, "Answers"));
      for (const [status, answer] of Object.entries(operation.responses)) {
        const [found] = this.resolve(answer);
        body.append(element("p", {}, element("code", {}, status), " ", found.description || ""));
        if (!answer.$ref) body.append(this.media(found.content));
      }
      body.append(element("h3", {}, "Example"), this.example(path, method, operation));
    };
    details.addEventListener("toggle", fill, { once: true });
    return details;
  }

  show() {
    const { info, tags, paths } = this.api;
    document.querySelector("h1").textContent = `${info.title} ${info.version}`;
    document.getElementById("about").textContent = info.description;
    const groups = document.getElementById("groups");
    const main = document.getElementById("operations");
    main.replaceChildren();
    for (const tag of tags) {
      groups.append(element("a", { href: `#${tag.name}` }, tag.name));
      main.append(element("h2", { id: tag.name }, tag.name), element("p", {}, tag.description));
      for (const [path, methods] of Object.entries(paths)) {
        for (const [method, operation] of Object.entries(methods)) {
          if ((operation.tags || []).includes(tag.name)) main.append(this.operation(path, method, operation));
        }
      }
    }
    groups.append(element("a", { href: "openapi.json" }, "openapi.json"));
    const named = location.hash && document.getElementById(location.hash.slice(1));
    if (named) {
      named.open = true;
      named.scrollIntoView();
    }
  }
}

fetch("openapi.json")
  .then((answer) => (answer.ok ? answer.json() : Promise.reject(new Error(`status ${answer.status}`))))
  .then((api) => new Page(api).show())
  .catch((error) => {
    document.getElementById("operations").textContent = `openapi.json cannot be shown: ${error.message}`;
  });
