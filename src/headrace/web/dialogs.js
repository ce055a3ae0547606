// Dialogs: a question with its reply, and the screen that asks for a key. Enter is their main
// button; in a text, Shift+Enter breaks the line.

const $ = (id) => document.getElementById(id);

// Asks for a text, or for a yes where there is none; null if the person would rather not.
export function question(words, value, numRows = 1) {
  const dialog = $("asking");
  $("question").textContent = words;
  $("reply").hidden = value === undefined;
  $("reply").value = value ?? "";
  $("reply").rows = numRows;
  dialog.returnValue = "no";
  dialog.showModal();
  if (value) $("reply").select();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes" ? (value === undefined ? true : $("reply").value.trim()) : null);
  });
}

let isPutOff = false; // no key until the page is opened anew

// Shows the screen. `take` tries a key, and says what is wrong with it; `remind` is called where the
// person has put it off.
export function askForKey(fault, take, remind) {
  const field = $("key").querySelector("input");
  $("key-fault").textContent = fault;
  if (isPutOff) return remind();
  if ($("key").open) return;
  $("key").querySelector("form").onsubmit = async (event) => {
    event.preventDefault();
    $("key-fault").textContent = await take(field.value.trim());
    if ($("key-fault").textContent) field.select();
    else $("key").close("taken");
  };
  $("key").onclose = () => (isPutOff = $("key").returnValue !== "taken") && remind();
  $("key").returnValue = "";
  $("key").showModal();
}

$("reply").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("asking").querySelector("form").requestSubmit($("asking").querySelector(".primary"));
});
for (const cancel of document.querySelectorAll("dialog .cancel")) cancel.addEventListener("click", () => cancel.closest("dialog").close("no"));
