// What a person with a token can do: sign in, confirm an action, and see its result.
//
// The key of the session is in the memory of this page alone. It is sent in a header, which no other site can do.

import { h } from "./dom.js";
import { bytes, count, percent, seconds } from "./format.js";
import { bar, code, hintWords, quoted, section, summaryWords } from "./parts.js";

/** The person who uses the page. `label` is null until the server has accepted a token. */
export class Person {
  constructor(dialog, render) {
    this.dialog = dialog;
    this.render = render;
    this.label = null;
    this.key = null;
    this.message = null; // of the last action
    this.isWaiting = false;
  }

  async post(path, document) {
    const headers = { "Content-Type": "application/json", ...(this.key === null ? {} : { Authorization: `Bearer ${this.key}` }) };
    try {
      const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(document), credentials: "omit" });
      const content = await answer.json().catch(() => ({ error: `the server answers with status ${answer.status}` }));
      if (answer.status === 401) this.forget();
      return answer.ok ? content : { error: "the server refuses it", ...content };
    } catch {
      return { error: "no connection to the launcher; the result is unknown" };
    }
  }

  forget() {
    this.label = null;
    this.key = null;
  }

  signIn() {
    const input = h("input", { type: "password", id: "token", name: "token", autocomplete: "current-password", required: true, "aria-describedby": "token-error" });
    const error = h("p", { class: "tone-wrong", id: "token-error", role: "alert" });
    const submit = async (event) => {
      event.preventDefault();
      const found = await this.post("/session", { token: input.value.trim() });
      input.value = "";
      if (found.error) error.textContent = found.error;
      else {
        this.key = found.session;
        this.label = found.label;
        this.message = null;
        this.dialog.close();
        this.render();
      }
    };
    this.show("Sign in", h("form", { onsubmit: submit }, h("label", { for: "token" }, "Token"), input, error, this.buttons("Sign in")));
    input.focus();
  }

  async signOut() {
    await this.post("/session", {});
    this.forget();
    this.message = null;
    this.render();
  }

  /** Ask for a confirmation, then run the action. `what` is a statement or a command with the same effect. */
  confirm(title, what, document, note = null) {
    const submit = (event) => {
      event.preventDefault();
      this.dialog.close();
      this.run(document);
    };
    this.show(title, h("form", { onsubmit: submit }, h("p", null, code(what)), note && h("p", { class: "quiet" }, note), this.buttons(title)));
  }

  async run(document) {
    this.isWaiting = true;
    this.message = { tone: "busy", text: `${document.action} …` };
    this.render();
    const found = await this.post("/actions", document);
    this.isWaiting = false;
    if (found.error) this.message = { tone: "wrong", text: [found.error, found.detail].filter(Boolean).join(". "), hint: found.hint };
    else this.message = { tone: "good", text: [`${document.action}: accepted`, ...found.messages].join(". ") };
    this.render();
  }

  buttons(label) {
    return h("div", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, label), h("button", { type: "button", onclick: () => this.dialog.close() }, "Cancel"));
  }

  show(title, content) {
    this.dialog.replaceChildren(h("h2", { id: "dialog-title" }, title), content);
    this.dialog.showModal();
  }
}

function button(label, person, onclick) {
  return h("button", { type: "button", disabled: person.isWaiting, onclick }, label);
}

export function actionSection(seen, person) {
  if (!seen.may_act) return null;
  const one = seen.summary;
  const base = { target: seen.key, subscription: one.name };
  const statement = (rest) => `ALTER SUBSCRIPTION ${quoted(one.name)} ${rest};`;
  const command = (name) => `subscriber ${name} ${shellWord(one.name)}`;
  return h("section", { class: "card", "aria-label": "Actions" },
    person.label === null
      ? h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => person.signIn() }, "Sign in to act"))
      : h("div", { class: "buttons" },
        seen.enabled
          ? button("Disable", person, () => person.confirm("Disable", statement("DISABLE"), { ...base, action: "disable" }, "The publisher keeps WAL until the subscription is enabled again."))
          : button("Enable", person, () => person.confirm("Enable", statement("ENABLE"), { ...base, action: "enable" })),
        button("Refresh", person, () => person.confirm("Refresh", statement("REFRESH PUBLICATION"), { ...base, action: "refresh" }, "New tables of the publications are copied.")),
        button("Verify", person, () => person.confirm("Verify", command("verify"), { ...base, action: "verify" }, "All tables are read on both servers.")),
        button("Repair", person, () => person.confirm("Repair", command("repair"), { ...base, action: "repair" }, "Rows of the target that differ are changed. Rows that the publisher does not have are kept, unless a rule of ownership says that they belong to the subscription.")),
        h("span", { class: "quiet" }, `signed in as ${person.label}`),
        h("button", { type: "button", class: "link", onclick: () => person.signOut() }, "Sign out")),
    person.message && h("p", { class: `tone-${person.message.tone}`, role: "status" }, person.message.text, person.message.hint?.length > 0 && h("span", { class: "hint" }, " ", hintWords(person.message.hint))));
}

function shellWord(name) {
  return /^[\w.@+-]+$/.test(name) ? name : `'${name.replaceAll("'", "'\\''")}'`;
}

export function taskSection(seen, person) {
  const task = seen.task;
  if (task === null) return null;
  const title = `${task.action === "verify" ? "Comparison" : "Repair"} of ${task.subscription}`;
  const share = task.total ? task.done / task.total : 0;
  const size = task.unit === "bytes" ? bytes : (number) => `${count(number)} ${task.unit}`;
  if (task.result === null) {
    return section(title,
      h("p", null, `${task.phase}${task.total ? `: ${percent(share)} of ${size(task.total)}` : ""}, for ${seconds((new Date() - new Date(task.began)) / 1000)}`),
      bar(share, title),
      person.label !== null && h("div", { class: "buttons" }, button("Cancel it", person, () => person.run({ target: seen.key, subscription: task.subscription, action: "cancel" }))));
  }
  const isWrong = task.result !== "done" || task.summary?.different > 0 || task.summary?.complete === false;
  return section(title, h("p", { class: isWrong ? "tone-wrong" : "tone-good" }, [task.result, summaryWords(task.summary)].filter(Boolean).join(": "), task.hint.length > 0 && h("span", { class: "hint" }, " ", hintWords(task.hint))));
}

export function skipButton(seen, person, conflict) {
  if (person.label === null) return null;
  return button("Skip", person, () => person.confirm("Skip", conflict.statement, { target: seen.key, subscription: seen.summary.name, action: "skip", lsn: conflict.finish_lsn }, "All changes of the transaction are lost on the target."));
}

export function retryButton(seen, person) {
  if (person.label === null) return null;
  const what = `ALTER SUBSCRIPTION ${quoted(seen.summary.name)} QUARANTINE RETRY;`;
  return h("div", { class: "buttons" }, button("Retry all", person, () => person.confirm("Retry", what, { target: seen.key, subscription: seen.summary.name, action: "retry" })));
}
