// The models that requests can name, and which backends serve them.

// From /v1/models where the key may read it, else the names that the session and the backends tell.
export function modelRows(entries, names, backends) {
  const servedBy = (id) => backends.filter((backend) => backend.models.includes(id)).map((backend) => backend.name);
  const servedByAny = (...ids) => ids.map(servedBy).find((names) => names.length) ?? []; // another name is that of its model
  if (entries) return entries.map((entry) => ({ ...entry, backends: servedByAny(entry.id, entry.root) }));
  const plain = (names ?? []).map((name) => (typeof name === "string" ? name : name.id));
  const all = new Set([...plain, ...backends.flatMap((backend) => backend.models)]);
  return [...all].map((id) => ({ id, parent: null, backends: servedBy(id) }));
}
