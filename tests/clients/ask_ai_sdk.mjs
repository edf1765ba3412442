// Vercel's AI SDK by three providers: tool loops, continued history, streams, structured output, embeddings, an error.
// Run by tests/ray/test_client_libraries.py.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.OPENAI_BASE_URL;
const openai = createOpenAI({ baseURL });
const compatible = createOpenAICompatible({
  name: "penstock", baseURL, includeUsage: true, supportsStructuredOutputs: true,
});

const weather = "What is the weather in Paris?";
const getWeather = tool({
  description: "Weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => ({ Paris: "sunny" })[city],
});
const loop = { tools: { get_weather: getWeather }, stopWhen: stepCountIs(3) };
const schema = z.object({ city: z.literal("Paris"), sky: z.enum(["sunny", "rainy"]) });
const common = { temperature: 0, maxRetries: 0 };

for (const provider of [openai, openai.chat, compatible]) {
  const model = provider("assistant");
  const first = await generateText({ model, prompt: weather, ...loop, ...common });
  assert.equal(first.text, "It is sunny in Paris.");
  const messages = [
    { role: "user", content: weather },
    ...first.response.messages,
    { role: "user", content: "What is 2 + 3?" },
  ];
  assert.equal((await generateText({ model, messages, ...loop, ...common })).text, "The sum is 5.");

  const turns = [
    { role: "user", content: "Hello!" },
    { role: "assistant", content: "Hello!" },
    { role: "user", content: "What is 2 + 3?" },
  ];
  const streamed = streamText({ model, messages: turns, ...common });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, "The sum is 5.");
  assert.ok((await streamed.usage).outputTokens > 5);

  const shaped = await generateText({ model, prompt: weather, output: Output.object({ schema }), ...common });
  assert.equal(shaped.output.city, "Paris");

  await assert.rejects(generateText({ model: provider("nobody"), prompt: weather, ...common }), (error) => {
    assert.ok(APICallError.isInstance(error));
    return error.statusCode === 404 && error.message.includes("'nobody' is not served here");
  });
}

for (const model of [openai.embedding("embedder"), compatible.embeddingModel("embedder")]) {
  const { embeddings } = await embedMany({ model, values: ["one", "two"], maxRetries: 0 });
  assert.equal(new Set(embeddings.map((row) => row.length)).size, 1);
}
