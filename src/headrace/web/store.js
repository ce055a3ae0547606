// Stores conversations and messages in IndexedDB. An answer's text and its cursor are one record, so one
// transaction writes both and they cannot disagree.

const NUM_AT_ONCE = 20; // messages; each may hold pictures

const opened = new Promise((resolve, reject) => {
  const asked = indexedDB.open("headrace", 1);
  asked.onupgradeneeded = () => {
    asked.result.createObjectStore("conversations", { keyPath: "id" });
    const messages = asked.result.createObjectStore("messages", { keyPath: "id" });
    messages.createIndex("conversation", "conversation");
    // `live` is 1 until the answer has ended; then the field is missing.
    messages.createIndex("live", "live");
  };
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

const bus = new BroadcastChannel("headrace");

export function onChange(act) {
  bus.addEventListener("message", (event) => act(event.data));
}

let faulted = () => {};

// `act` is called each time that this browser fails to save or to read.
export const onFault = (act) => (faulted = act);

const tell = (conversation) => bus.postMessage({ conversation });

async function transact(mode, work) {
  try {
    return await attempt(mode, work);
  } catch (error) {
    faulted();
    throw error;
  }
}

async function attempt(mode, work) {
  const database = await opened;
  const transaction = database.transaction(["conversations", "messages"], mode);
  const stores = [transaction.objectStore("conversations"), transaction.objectStore("messages")];
  const asked = work(...stores);
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

const everything = () => transact("readonly", (all) => all.getAll());

// A deleted conversation stays for a few seconds, marked, and is not shown.
export const conversations = async () => (await everything()).filter(({ deleted }) => !deleted);
export const deletedConversations = async () => (await everything()).filter(({ deleted }) => deleted);
export async function conversation(id) {
  const found = await transact("readonly", (all) => all.get(id));
  return found?.deleted ? undefined : found;
}
export const messagesOf = async (id) => withoutCircles(await transact("readonly", (_, all) => all.index("conversation").getAll(id)));
export const liveMessages = () => transact("readonly", (_, all) => all.index("live").getAll(1));

// Breaks circles of parents, which an imported file may contain: a message that precedes itself loses its parent.
function withoutCircles(messages) {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const sound = new Set();
  for (const message of messages) {
    const passed = new Set();
    for (let at = message; at && !sound.has(at.id); at = byId.get(at.parent)) {
      passed.add(at.id);
      if (passed.has(at.parent)) at.parent = null;
    }
    for (const id of passed) sound.add(id);
  }
  return messages;
}

// Reads all messages, some at a time so that the page stays responsive, until `take` returns false.
export function readMessages(take) {
  return transact("readonly", (_, all) => {
    const read = (range) => {
      all.getAll(range, NUM_AT_ONCE).onsuccess = ({ target: { result } }) => {
        if (result.length && take(result) !== false) read(IDBKeyRange.lowerBound(result.at(-1).id, true));
      };
    };
    read(null);
  });
}

// Changes these fields of a conversation as it is stored now, since the caller's copy may be older.
export async function changeConversation(id, fields) {
  await transact("readwrite", (all) => change(all, { id, ...fields }));
  tell(id);
}

// Merges `changed` into the record with its id. If there is no such record, it starts from `first`, if that is
// given.
function change(records, changed, first) {
  records.get(changed.id).onsuccess = ({ target: { result: stored = first } }) => {
    if (stored) records.put({ ...stored, ...changed });
  };
}

// Saves a new or continued conversation and its new messages, all or none.
export async function saveTurn(conversation, turn) {
  const { id, leaf, updated } = conversation;
  await transact("readwrite", (all, messages) => {
    change(all, { id, leaf, updated, deleted: undefined }, conversation);
    for (const message of turn) messages.put(message);
  });
  tell(conversation.id);
}

// Adds what is not stored yet. Of a conversation that is stored, the copy that was changed last stays; of a
// message, the longer one. Returns how many conversations are new, and how many have new content.
export async function merge(found) {
  const isNewer = (one, old) => one.updated > old.updated || old.deleted;
  const [added, changed] = [new Set(), new Set()];
  const isFurther = (one, old) => !old.live && one.conversation === old.conversation && one.text !== old.text && one.text.startsWith(old.text);
  await transact("readwrite", (all, messages) => {
    for (const one of found.conversations) putOver(all, one, isNewer, (isNew) => (isNew ? added : changed).add(one.id));
    for (const one of found.messages) putOver(messages, one, isFurther, () => changed.add(one.conversation));
  });
  tell(null);
  return { numAdded: added.size, numChanged: [...changed].filter((id) => !added.has(id)).length };
}

function putOver(records, one, isBetter, put) {
  records.get(one.id).onsuccess = ({ target: { result: old } }) => {
    if (old && !isBetter(one, old)) return;
    records.put({ ...old, ...one, deleted: undefined });
    put(!old);
  };
}

export async function removeConversation(id) {
  await transact("readwrite", (all, messages) => {
    all.delete(id);
    messages.index("conversation").openKeyCursor(id).onsuccess = ({ target: { result } }) => {
      if (!result) return;
      messages.delete(result.primaryKey);
      result.continue();
    };
  });
  tell(id);
}

// Returns the position of a cursor as [event, part].
export function place(cursor) {
  const found = /:(\d+)(?:\.(\d+))?$/.exec(cursor || "");
  return found ? [Number(found[1]), Number(found[2] ?? 0)] : [-1, 0];
}

export function isBehind(cursor, other) {
  const [event, part] = place(cursor);
  const [otherEvent, otherPart] = place(other);
  return event < otherEvent || (event === otherEvent && part < otherPart);
}

// Keeps the stored record if another tab has received more of this answer, or has deleted it.
export async function saveAnswer(answer) {
  await transact("readwrite", (_, messages) => {
    const asked = messages.get(answer.id);
    asked.onsuccess = () => {
      const stored = asked.result;
      if (!stored || (stored.stream && stored.stream !== answer.stream)) return;
      if (!stored.live && answer.live) return;
      if (isBehind(answer.cursor, stored.cursor)) return;
      messages.put({ ...answer, stopping: answer.stopping || stored.stopping });
    };
  });
  if (!answer.live) tell(answer.conversation);
}
