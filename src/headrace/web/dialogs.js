// The screen that asks for a key.

const $ = (id) => document.getElementById(id);

// True once the person has chosen "Not now", until the page is loaded again.
let isPutOff = false;

// Shows the screen. `take` tries a key, and returns why it is wrong. `remind` is called if the person has put the
// question off and has not asked for it now.
export function askForKey(fault, take, remind, isWanted = false) {
  const field = $("key").querySelector("input");
  $("key-fault").textContent = fault;
  if (isPutOff && !isWanted) return remind();
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

for (const cancel of document.querySelectorAll("dialog .cancel")) cancel.addEventListener("click", () => cancel.closest("dialog").close("no"));
