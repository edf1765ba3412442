// Asks a running server by OpenAI's Node client. Prints what came back as one line of JSON.
//   node ask.mjs BASE_URL
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "What is Penstock?" }];
const model = "assistant";

const chat = await client.chat.completions.create({ model, messages, temperature: 0 });

let streamed = "";
const stream = await client.chat.completions.create({
  model, messages, temperature: 0, stream: true, stream_options: { include_usage: true },
});
let usage;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}

const response = await client.responses.create({ model, input: messages[0].content, temperature: 0 });

let events = [];
const eventStream = await client.responses.create({ model, input: messages, temperature: 0, stream: true });
for await (const event of eventStream) events.push(event.type);

const embedded = await client.embeddings.create({ model: "embedder", input: ["one", "two"] });

let refused;
try {
  await client.chat.completions.create({ model: "nobody", messages });
} catch (error) {
  refused = { kind: error.constructor.name, status: error.status, code: error.code, message: error.message };
}

console.log(JSON.stringify({
  chat: chat.choices[0].message.content,
  streamed,
  completionTokens: usage.completion_tokens,
  response: response.output_text,
  events: [...new Set(events)],
  dimensions: embedded.data.map((row) => row.embedding.length),
  refused,
}));
