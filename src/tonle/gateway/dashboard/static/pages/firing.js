// Alerts whose newest word is that they fire. Missed targets stand in their own card.
export function firingOf(alerts) {
  const newest = new Map();
  for (const alert of [...(alerts ?? [])].sort((a, b) => a.time - b.time)) newest.set(`${alert.kind} ${alert.subject}`, alert);
  return [...newest.values()].filter((alert) => alert.state === "firing" && alert.kind !== "sla");
}
