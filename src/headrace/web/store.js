// Conversations and messages in IndexedDB. An answer's text and its cursor are one record, so they
// are written by one transaction and cannot disagree.

const NUM_AT_ONCE = 20; // messages; each may hold pictures

const opened = new Promise((resolve, reject) => {
  const asked = indexedDB.open("headrace", 1);
  asked.onupgradeneeded = () => {
    asked.result.createObjectStore("conversations", { keyPath: "id" });
    const messages = asked.result.createObjectStore("messages", { keyPath: "id" });
    messages.createIndex("conversation", "conversation");
    messages.createIndex("live", "live"); // 1 while the answer is due; else the field is missing
  };
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

const bus = new BroadcastChannel("headrace");

export function onChange(act) {
  bus.addEventListener("message", (event) => act(event.data));
}

let faulted = () => {};

// `act` is called each time that this browser does not keep, or does not find, what it should.
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

// What is deleted stays for a moment, marked, and is not seen.
export const conversations = async () => (await everything()).filter(({ deleted }) => !deleted);
export const deletedConversations = async () => (await everything()).filter(({ deleted }) => deleted);
export async function conversation(id) {
  const found = await transact("readonly", (all) => all.get(id));
  return found?.deleted ? undefined : found;
}
export const messagesOf = async (id) => withoutCircles(await transact("readonly", (_, all) => all.index("conversation").getAll(id)));
export const liveMessages = () => transact("readonly", (_, all) => all.index("live").getAll(1));

// A message that comes before itself (an imported file may say so) has nothing before it.
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

// All messages, some at a time, so that the page stays quick; until `take` returns false.
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

// Changes these fields of a conversation as it is stored now; what the caller knows of it may be older.
export async function changeConversation(id, fields) {
  await transact("readwrite", (all) => change(all, { id, ...fields }));
  tell(id);
}

// Puts what `changed` has over the record of its id; where there is none, that is `first`, if anything.
function change(records, changed, first) {
  records.get(changed.id).onsuccess = ({ target: { result: stored = first } }) => {
    if (stored) records.put({ ...stored, ...changed });
  };
}

// A conversation, new or gone on, with messages, all or none.
export async function saveTurn(conversation, turn) {
  const { id, leaf, updated } = conversation;
  await transact("readwrite", (all, messages) => {
    change(all, { id, leaf, updated, deleted: undefined }, conversation);
    for (const message of turn) messages.put(message);
  });
  tell(conversation.id);
}

// Adds what is not here yet. Of a conversation that is, the one that was changed last stays; of a
// message, the one that has come further. Returns how many conversations were new, and how many
// gained something.
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

// How far an answer has come: [event, part] of its cursor.
export function place(cursor) {
  const found = /:(\d+)(?:\.(\d+))?$/.exec(cursor || "");
  return found ? [Number(found[1]), Number(found[2] ?? 0)] : [-1, 0];
}

export function isBehind(cursor, other) {
  const [event, part] = place(cursor);
  const [otherEvent, otherPart] = place(other);
  return event < otherEvent || (event === otherEvent && part < otherPart);
}

// Another tab may have come further with the same answer, or deleted it: its record stays then.
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
