"use strict";
// Keys, and parts of pages that renew themselves. Pages work without it.
const go = (rel) => {
  const target = document.querySelector(`a[data-go="${rel}"]`);
  if (target) target.click();
};

const moveCard = (step) => {
  const cards = [...document.querySelectorAll("a.card")];
  if (!cards.length) return;
  const at = cards.indexOf(document.activeElement);
  cards[Math.min(Math.max(at + step, 0), cards.length - 1)].focus();
};

const find = (event) => {
  const field = document.querySelector("main [data-find]") || document.querySelector("[data-find]");
  if (!field) return;
  event.preventDefault();
  field.focus();
  field.select();
};

const toggleTokens = () => {
  const tokens = document.querySelector("details.by-token");
  if (tokens) tokens.open = !tokens.open;
};

const showKeys = () => {
  const keys = document.querySelector("dialog");
  if (keys && !keys.open) keys.showModal();
};

const KEYS = {
  ArrowRight: () => go("next"),
  n: () => go("next"),
  ArrowLeft: () => go("previous"),
  p: () => go("previous"),
  ArrowUp: () => go("up"),
  ArrowDown: () => go("down"),
  j: () => moveCard(1),
  k: () => moveCard(-1),
  t: toggleTokens,
  "/": find,
  "?": showKeys,
  d: () => go("dataset"),
  s: () => go("step"),
  r: () => go("run"),
  c: () => go("compare"),
};

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA|VIDEO|AUDIO)$/.test(document.activeElement.tagName);
  if (event.key === "Escape" && typing) document.activeElement.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (Object.hasOwn(KEYS, event.key)) KEYS[event.key](event);
});
const help = document.querySelector("button[data-help]");
if (help) help.addEventListener("click", showKeys);

// <div data-renew="/url" data-every="ms"> asks for itself again until the answer has no data-every.
const renew = async (part) => {
  let next = part;
  try {
    const answer = await fetch(part.dataset.renew, { credentials: "same-origin" });
    if (answer.ok) {
      const found = new DOMParser().parseFromString(await answer.text(), "text/html").body.firstElementChild;
      if (found) {
        part.replaceWith(found);
        next = found;
      }
    }
  } catch {
    // The server has gone, or is busy: try again.
  }
  watch(next);
};
const watch = (part) => {
  if (part.dataset.every) setTimeout(() => renew(part), Number(part.dataset.every));
};
document.querySelectorAll("[data-renew]").forEach(watch);
