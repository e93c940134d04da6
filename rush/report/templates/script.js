"use strict";
// Three small comforts: the theme, copying a recipe, and what bars or curves show. Without script the page
// is complete; the buttons stay hidden then.
(() => {
  const root = document.documentElement;
  const say = (words) => { document.getElementById("said").textContent = words; };

  const theme = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    theme.setAttribute("aria-pressed", String(isDark()));
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", isDark() ? "Switch to the light page" : "Switch to the dark page");
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  theme.hidden = false;
  show();

  const copyBySelection = (source) => {
    const range = document.createRange();
    range.selectNodeContents(source);
    const selection = window.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    const done = document.execCommand("copy");
    if (done) selection.removeAllRanges();
    return done;
  };
  const copy = async (source) => {
    try {
      await navigator.clipboard.writeText(source.textContent);
      return true;
    } catch {
      return copyBySelection(source);
    }
  };
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    const label = button.firstChild;
    button.addEventListener("click", async () => {
      const done = await copy(document.getElementById(button.dataset.copy));
      label.data = done ? "Copied" : "Select and copy";
      say(done ? "Copied" : "Could not copy; the recipe is selected");
      window.setTimeout(() => { label.data = "Copy"; }, 2000);
    });
  }

  for (const group of document.querySelectorAll(".choice")) {
    group.hidden = false;
    const buttons = group.querySelectorAll("button");
    for (const button of buttons) {
      button.addEventListener("click", () => {
        document.getElementById(group.dataset.of).dataset.mode = button.dataset.show;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      });
    }
  }
})();
