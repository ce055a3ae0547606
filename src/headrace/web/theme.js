// Applies the theme and the text size before the page is drawn for the first time. This is not a module, because the
// browser runs modules later.

function applyLook() {
  let look = {};
  try {
    look = JSON.parse(localStorage.getItem("headrace-settings") ?? "{}");
  } catch {
    // Without its storage, the page looks as the system does.
  }
  const { style } = document.documentElement;
  style.colorScheme = ["light", "dark"].includes(look?.theme) ? look.theme : "";
  style.fontSize = /^(87\.5|112\.5|125)%$/.test(look?.size) ? look.size : "";
}
applyLook();
// Another tab has changed the settings.
addEventListener("storage", applyLook);
