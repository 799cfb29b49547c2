// An mqtt.js client on a leash: one JSON command a line on stdin, one JSON event a line on stdout.
//
//   {"do": "connect", "url": …, "options": {…}}         → connect, reconnect, offline, close, disconnect, error, message
//   {"do": "subscribe", "filters": …, "options": {…}}   → subscribed | failed
//   {"do": "unsubscribe", "filters": […]}               → unsubscribed | failed
//   {"do": "publish", "topic": …, "payload": …, "options": {…}} → published (when the flow is over) | failed
//   {"do": "end", "options": {…}} or {"do": "drop"}      → ended | close
//
// Payloads travel as latin-1 text, so that every byte has its character.
"use strict";

const mqtt = require("mqtt");
const readline = require("readline");

const say = (event, fields) => process.stdout.write(JSON.stringify({ event, ...fields }) + "\n");
const bytes = (text) => Buffer.from(text, "latin1");

function incoming(properties) {
  if (properties && properties.correlationData) {
    return { ...properties, correlationData: properties.correlationData.toString("latin1") };
  }
  return properties;
}

function outgoing(options) {
  const properties = options && options.properties;
  if (properties && properties.correlationData) properties.correlationData = bytes(properties.correlationData);
  return options;
}

let client;

const commands = {
  connect({ url, options }) {
    if (options.will) outgoing(options.will).payload = bytes(options.will.payload);
    client = mqtt.connect(url, options);
    client.on("connect", (p) => say("connect", { sessionPresent: p.sessionPresent, properties: p.properties }));
    client.on("message", (topic, payload, packet) =>
      say("message", {
        topic,
        payload: payload.toString("latin1"),
        qos: packet.qos,
        retain: packet.retain,
        properties: incoming(packet.properties),
      }),
    );
    client.on("disconnect", (p) => say("disconnect", { reasonCode: p.reasonCode }));
    client.on("error", (error) => say("error", { message: error.message, code: error.code }));
    for (const name of ["reconnect", "offline", "close"]) client.on(name, () => say(name));
  },
  subscribe({ filters, options }) {
    client.subscribe(filters, options || { qos: 0 }, (error, granted) =>
      error ? say("failed", { message: error.message }) : say("subscribed", { granted: granted.map((g) => g.qos) }),
    );
  },
  unsubscribe({ filters }) {
    client.unsubscribe(filters, (error) => (error ? say("failed", { message: error.message }) : say("unsubscribed")));
  },
  publish({ topic, payload, options }) {
    client.publish(topic, bytes(payload), outgoing(options || {}), (error, packet) =>
      error
        ? say("failed", { message: error.message, code: error.code })
        : say("published", { reasonCode: packet && packet.reasonCode }),
    );
  },
  end({ options }) {
    client.end(false, options || {}, () => say("ended"));
  },
  drop() {
    client.stream.destroy();
  },
};

readline
  .createInterface({ input: process.stdin })
  .on("line", (line) => {
    const command = JSON.parse(line);
    commands[command.do](command);
  })
  .on("close", () => process.exit(0));
