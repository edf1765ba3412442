"""The capabilities: what each needs of vLLM, on which others it stands, and what is lost without it.

The floor is what Penstock cannot do without. References are below the package `vllm`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engines.vllm.capabilities.needs import Need, exactly, fields, has, one_of, says, takes


@dataclass(frozen=True, slots=True)
class Capability:
    """lost: what a user notices where it is off. on: names of others without which it is off, too."""

    lost: str
    needs: tuple[Need, ...]
    on: tuple[str, ...] = ()


_LLM = "v1.engine.async_llm:AsyncLLM"
_CLIENT = "v1.engine.core_client:AsyncMPClient"
_CORE = "v1.engine.core:EngineCoreProc"
_OUTPUTS = "v1.engine.output_processor"
_DETOKENIZER = "v1.engine.detokenizer"
_PARSER = "parser.abstract_parser:DelegatingParser"
_CHAT = "entrypoints.openai.chat_completion.serving:OpenAIServingChat"
_COMPLETION = "entrypoints.openai.completion.serving:OpenAIServingCompletion"
_RESPONSES = "entrypoints.openai.responses.serving:OpenAIServingResponses"
_MESSAGES = "entrypoints.anthropic.serving:AnthropicServingMessages"
_MODELS = "entrypoints.openai.models.serving:OpenAIServingModels"
_RENDERER = "renderers.base:BaseRenderer"
_TOKENIZE = "renderers.params:TokenizeParams"
_SCORES = "entrypoints.pooling.scoring.io_processor:ScoringIOProcessor"
_TOKENS = "entrypoints.serve.tokenize.serving:ServingTokenization"
_BATCH_CHAT = "entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch"
_CHAT_REQUEST = "entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"
_COMPLETION_REQUEST = "entrypoints.openai.completion.protocol:CompletionRequest"
_SPEECH = "entrypoints.speech_to_text"
_XGRAMMAR = "v1.structured_output.backend_xgrammar"
_GENERATING = "entrypoints.generate.base.protocol"
_UNTOUCHED = "return (DeltaMessage(content=delta_text) if delta_text else None), False"
_MADE = "(request, sampling_params, result_generator, context, model_name, tokenizer, request_metadata)"

_COMPLETION_OUTPUT = fields(
    "outputs:CompletionOutput",
    "index text token_ids cumulative_logprob logprobs routed_experts sampling_mask finish_reason stop_reason"
    " lora_request spec_decode_metrics",
    new="weight_versions",
)

FLOOR: tuple[Need, ...] = (
    takes(f"{_CORE}.__init__(vllm_config, executor_class, handshake_address, local_client, log_stats)"),
    takes(f"{_CORE}.run_engine_core(vllm_config, dp_rank)"),
    has(_CORE, "ENGINE_CORE_DEAD _send_engine_dead"),
    takes(
        f"{_LLM}.__init__(vllm_config, executor_class, log_stats, log_requests, usage_context, stat_loggers,"
        " client_addresses)"
    ),
    has(_CLIENT, "input_socket"),
    has(_LLM, "engine_core output_handler"),
    says("v1.engine.core_client", '"input_address"', '"output_address"'),
    says("v1.engine.core", '"HELLO"', '"READY"'),
    fields("v1.engine.utils:EngineHandshakeMetadata", "addresses parallel_config"),
    fields(
        "v1.engine.utils:EngineZmqAddresses",
        "inputs outputs coordinator_input coordinator_output frontend_stats_publish_address",
    ),
    has(_LLM, "add_request generate encode abort shutdown get_supported_tasks collective_rpc"),
    has(_LLM, "add_lora remove_lora"),
    has("engine.arg_utils", "AsyncEngineArgs.create_engine_config"),
    has("v1.executor", "Executor.get_class"),
    takes("entrypoints.launchers.app:build_app(args, supported_tasks, model_config)"),
    takes(
        "entrypoints.launchers.api_server.app_state:init_app_state(engine_client, state, args,"
        " supported_tasks)"
    ),
    one_of(
        *(
            has(module, "FrontendArgs make_arg_parser validate_parsed_serve_args")
            for module in ("entrypoints.launchers.cli_args", "entrypoints.common.cli_args")
        )
    ),
    has("utils.argparse_utils", "FlexibleArgumentParser"),
    has("config", "VllmConfig SpeculativeConfig"),
    has("envs", "disable_envs_cache enable_envs_cache"),
    has("usage.usage_lib", "UsageContext"),
    has("transformers_utils.config", "maybe_register_config_serialize_by_value"),
    has("tokenizers", "cached_tokenizer_from_config"),
    has("model_executor.model_loader", "get_model_loader"),
    has("exceptions", "VLLMValidationError VLLMClientError VLLMNotFoundError GracefulHTTPError"),
    has("v1.engine.exceptions", "EngineDeadError"),
    has("sampling_params", "RequestOutputKind.DELTA StructuredOutputsParams SamplingParams"),
    has("logprobs", "Logprob"),
    has("platforms", "current_platform"),
    has("outputs", "CompletionOutput.token_ids RequestOutput"),
)

CAPABILITIES: dict[str, Capability] = {
    "lasting_core": Capability(
        "a request that the core cannot decode ends the engine, and a failed thread of the core goes unseen",
        (
            has("v1.serial_utils", "MsgpackDecoder.decode"),
            has("v1.engine.core", "MsgpackDecoder DPEngineCoreProc"),
            has(_CORE, "process_input_sockets process_output_sockets"),
            exactly(f"{_CORE}.preprocess_add_request(request)"),
            exactly(f"{_CORE}._send_engine_dead()"),
            has("v1.engine", "EngineCoreRequest.request_id"),
            has("logger", "init_logger"),
        ),
    ),
    "token_groups": Capability(
        "the tokens of non-streaming requests are sent one by one",
        (
            exactly(f"{_CORE}.add_request(request, request_wave)"),
            exactly(f"{_CORE}.abort_requests(request_ids)"),
            exactly(f"{_CORE}.step()"),
            exactly(f"{_CORE}.step_with_batch_queue()"),
            exactly(f"{_CORE}.pause_scheduler(mode, clear_cache)"),
            has(_CORE, "output_queue"),
            has("v1.request:Request", "is_finished resumable"),
            has("v1.engine", "PauseMode"),
            has("sampling_params", "RequestOutputKind.FINAL_ONLY SamplingParams.num_logprobs"),
            fields(
                "v1.engine:EngineCoreOutput",
                "request_id new_token_ids"
                # Looked at, output by output.
                " finish_reason events prefill_stats new_logprobs new_sampling_mask routed_experts"
                " num_nans_in_logits"
                # Only with the first or the last output.
                " new_prompt_logprobs_tensors pooling_output stop_reason kv_transfer_params"
                " ec_transfer_params trace_headers mm_cache_miss_hashes spec_decode_metrics",
                new="prompt_token_id_logprobs error",
            ),
            fields(
                "v1.engine:EngineCoreOutputs",
                "engine_index outputs scheduler_stats timestamp utility_output finished_requests"
                " wave_complete start_wave",
                new="weight_version",
            ),
        ),
        on=("lasting_core",),
    ),
    "data_parallel": Capability(
        "replicas cannot share a model's experts (data_parallel_size)",
        (
            has("v1.engine.core", "DPEngineCoreProc"),
            has("utils.network_utils", "get_tcp_uri"),
            has(
                "config:ParallelConfig",
                "_coord_store_port data_parallel_master_ip _data_parallel_master_port_list",
            ),
            takes(
                "v1.engine.coordinator:DPCoordinatorProc.run_coordinator(engine_count,"
                " front_publish_address, back_output_address, back_publish_address, zmq_addr_pipe)"
            ),
            takes("distributed.utils:create_tcp_store(host, port, is_master, world_size, wait_for_workers)"),
        ),
    ),
    "scheduler_stats": Capability(
        "load is counted in open requests alone, and a core that is stuck is not noticed",
        (
            exactly(
                "v1.metrics.loggers:StatLoggerBase.record(scheduler_stats, iteration_stats, mm_cache_stats,"
                " engine_idx)"
            ),
            has(
                "v1.metrics.stats:SchedulerStats",
                "num_running_reqs num_waiting_reqs num_skipped_waiting_reqs kv_cache_usage",
            ),
        ),
    ),
    "request_timings": Capability(
        "requests do not show how long they waited, prefilled and decoded",
        (
            has(_LLM, "output_processor"),
            has(
                _OUTPUTS, "OutputProcessor.request_states OutputProcessor.parent_requests RequestState.stats"
            ),
            has(_OUTPUTS, "RequestOutputCollector.request_id"),
            has("v1.engine.parallel_sampling", "ParentRequest.child_requests"),
            has("v1.metrics.stats:RequestStateStats", "queued_ts scheduled_ts first_token_ts last_token_ts"),
        ),
    ),
    "fast_stream": Capability(
        "every piece of a stream is made by vLLM's response classes",
        (
            exactly(
                f"{_OUTPUTS}:RequestState.make_request_output(new_token_ids, pooling_output, finish_reason,"
                " stop_reason, kv_transfer_params, ec_transfer_params)",
                new="error",
            ),
            has(f"{_OUTPUTS}:RequestState", "queue stream_interval external_req_id detokenizer"),
            exactly(f"{_DETOKENIZER}:BaseIncrementalDetokenizer.get_next_output_text(finished, delta)"),
            has(f"{_OUTPUTS}:RequestOutputCollector", "output put"),
            has(_CHAT, "chat_completion_stream_generator parser_cls request_logger"),
            has(_COMPLETION, "completion_stream_generator"),
            _COMPLETION_OUTPUT,
            exactly(
                "outputs:RequestOutput.__init__(request_id, prompt, prompt_token_ids, prompt_logprobs,"
                " outputs, finished, metrics, lora_request, encoder_prompt, encoder_prompt_token_ids,"
                " num_cached_tokens, num_cache_creation_tokens, kv_transfer_params, ec_transfer_params)",
                new="prompt_token_id_logprobs",
            ),
        ),
    ),
    "fast_stream_beside_tools": Capability(
        "of a model with a tool parser, streams without tools are made by vLLM's response classes, too",
        (
            has(_PARSER, "parse_delta"),
            has("tool_parsers.abstract_tool_parser", "ToolParser.engine_based_streaming"),
            says("parser.abstract_parser", _UNTOUCHED),
        ),
        on=("fast_stream",),
    ),
    "stop_strings": Capability(
        "stop strings also end the reasoning, and spoil how streams are parsed",
        (
            exactly(
                f"{_OUTPUTS}:RequestState.from_new_request(cls, tokenizer, request, prompt, parent_req,"
                " request_index, queue, log_stats, stream_interval)"
            ),
            exactly(f"{_OUTPUTS}:RequestState._new_completion_output(token_ids, finish_reason, stop_reason)"),
            exactly(f"{_DETOKENIZER}:BaseIncrementalDetokenizer.update(new_token_ids, stop_terminated)"),
            has(_DETOKENIZER, "BaseIncrementalDetokenizer.get_next_output_text"),
            exactly(
                f"{_DETOKENIZER}:check_stop_strings(output_text, new_char_count, stop, include_in_output)"
            ),
            has("v1.engine", "EngineCoreRequest.reasoning_parser_kwargs"),
            takes("parser.parser_manager:ParserManager.get_parser(cls, reasoning_parser_name, is_harmony)"),
            takes(f"{_PARSER}.parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished)"),
        ),
    ),
    "single_tokens": Capability(
        "a busy engine's streams may have broken tool calls, and markers in their reasoning",
        (
            has(_PARSER, "reasoning_parser_cls tool_parser_cls"),
            has("tool_parsers.abstract_tool_parser", "ToolParser.engine_based_streaming"),
            has("reasoning", "ReasoningParser.engine_based_streaming"),
            has(_CHAT, "create_chat_completion"),
            has(_RESPONSES, "responses_stream_generator"),
        ),
        on=("stop_strings",),
    ),
    "waiting_outputs": Capability(
        "tokens that wait while the front-end is busy cost it as much as those that do not",
        (
            says(
                "v1.engine.core_client", "outputs_queue.put_nowait(outputs)", "await self.outputs_queue.get()"
            ),
            has(_CLIENT, "outputs_queue"),
            has(_LLM, "output_processor engine_core"),
            has("v1.engine", "EngineCoreOutput.new_token_ids EngineCoreOutputs.outputs"),
        ),
        on=("stop_strings",),
    ),
    "request_limits": Capability(
        "a request may ask for more than the limits of docs/reference/limits.md",
        (
            exactly(f"{_COMPLETION}.create_completion(request, raw_request)"),
            exactly(f"{_BATCH_CHAT}.create_batch_chat_completion(request, raw_request)"),
            exactly(f"{_TOKENS}.create_tokenize(request, raw_request)"),
            exactly(f"{_TOKENS}.create_detokenize(request, raw_request)"),
        ),
    ),
    "runner_limits": Capability(
        "on a GPU a request with more token ids in a list than the runner has room for ends the engine",
        (
            has("config.vllm", "VllmConfig.use_v2_model_runner"),
            has("envs", "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"),
            has(
                "v1.worker.gpu.sample.logit_bias",
                "MAX_NUM_ALLOWED_TOKEN_IDS MAX_NUM_LOGIT_BIAS_TOKENS MAX_NUM_STOP_TOKEN_IDS",
            ),
            has("sampling_params:SamplingParams", "all_stop_token_ids bad_words_token_ids"),
        ),
    ),
    "text_limits": Capability(
        "a prompt to truncate is tokenized whole, and every prompt waits for those before it",
        (
            exactly(f"{_TOKENIZE}.apply_pre_tokenization(tokenizer, prompt)"),
            has(_TOKENIZE, "max_input_tokens max_truncation_tokens truncation_side return_token_offsets"),
            has(_RENDERER, "_executor mm_processor"),
            has("tokenizers.protocol", "TokenizerLike.max_chars_per_token"),
            has("renderers.base", "_SwappableExecutor.replace_inner"),
            has("tokenizers.hf", "ThreadSafeHFTokenizerMixin"),
            exactly(f"{_SCORES}.valid_inputs_online(request)"),
            takes(f"{_SCORES}._get_token_limits(request)"),
        ),
    ),
    "request_models": Capability(
        "a value of a wrong type may be answered with 500, a long wrong list slowly",
        (
            has("entrypoints.anthropic.protocol", "AnthropicCountTokensRequest AnthropicMessagesRequest"),
            has(_MESSAGES, "to_chat_completion_request"),
            has(
                "entrypoints.openai.chat_completion.protocol",
                "BatchChatCompletionRequest ChatCompletionRequest",
            ),
            has("entrypoints.openai.completion.protocol", "CompletionRequest"),
            has("entrypoints.openai.responses.protocol", "ResponsesRequest"),
            has("entrypoints.pooling.classify.protocol", "ClassificationRequest"),
            has("entrypoints.pooling.embed.protocol", "CohereEmbedRequest EmbeddingRequest"),
            has("entrypoints.pooling.pooling.protocol", "PoolingRequest"),
            has("entrypoints.pooling.scoring.protocol", "ScoringRequest"),
            has("entrypoints.serve.tokenize.protocol", "DetokenizeRequest TokenizeRequest"),
        ),
    ),
    "direct_routes": Capability(
        "every request passes FastAPI's routing and middleware",
        (
            takes(
                "entrypoints.openai.chat_completion.api_router:create_chat_completion(request, raw_request)"
            ),
            takes("entrypoints.openai.completion.api_router:create_completion(request, raw_request)"),
        ),
        on=("request_limits", "request_models"),
    ),
    "continued_streams": Capability(
        "a stream ends when its replica does",
        (
            exactly(f"{_CLIENT}.add_request_async(request)"),
            has(_OUTPUTS, "RequestOutputCollector.output RequestOutputCollector.request_id"),
            exactly(f"{_OUTPUTS}:RequestOutputCollector.get()"),
            exactly(f"{_OUTPUTS}:RequestOutputCollector.get_nowait()"),
            takes(f"{_OUTPUTS}:OutputProcessor.process_outputs(engine_core_outputs)"),
            has(_OUTPUTS, "OutputProcessor.request_states OutputProcessor.parent_requests"),
            has(_OUTPUTS, "RequestState.is_prefilling RequestState.detokenizer RequestState.request_index"),
            says("v1.engine.parallel_sampling", 'child_req_id = f"{index}_{self.request_id}"'),
            has("v1.engine", "FinishReason.STOP EngineCoreOutput.finish_reason EngineCoreOutput.stop_reason"),
            has("v1.engine.logprobs", "LogprobsProcessor.logprobs LogprobsProcessor.cumulative_logprob"),
            has("logprobs", "Logprob.logprob Logprob.rank Logprob.decoded_token"),
            has("sampling_params:SamplingParams", "extra_args num_logprobs flat_logprobs prompt_logprobs"),
            has("config.vllm", "VllmConfig.use_v2_model_runner"),
            has("config", "ModelConfig.logits_processors ModelConfig.is_encoder_decoder"),
            has("utils", "random_uuid"),
            has("platforms", "CpuArchEnum current_platform"),
            exactly("v1.request:Request.from_engine_core_request(cls, request, block_hasher)"),
            exactly("v1.request:Request.append_output_token_ids(token_ids)"),
            says("v1.core.sched.scheduler", "if request.prefill_stats ", "if prefill_stats is not None:"),
            takes("v1.engine.core:EngineCore.collective_rpc(method)"),
            exactly("v1.worker.gpu_input_batch:CachedRequestState.__post_init__()"),
            has("v1.worker.gpu_input_batch:CachedRequestState", "output_token_ids generator sampling_params"),
            says("v1.core.sched.scheduler", "req._all_token_ids,"),
        ),
        on=("direct_routes", "request_timings"),
    ),
    "continued_grammars": Capability(
        "a stream with structured output or forced tools ends when its replica does",
        (
            exactly("v1.structured_output:StructuredOutputManager._create_grammar(request)"),
            exactly("v1.structured_output:StructuredOutputManager.accept_tokens(request, new_token_ids)"),
            has(
                "v1.structured_output.request:StructuredOutputRequest",
                "grammar reasoning_ended reasoner reasoning_parser_kwargs",
            ),
        ),
        on=("continued_streams",),
    ),
    "continued_seeds": Capability(
        "a stream with a seed ends when its replica does, unless vLLM's second model runner made it",
        (
            says("v1.sample.ops.topk_topp_sampler", "0, 2**31, (1,), generator=gen, dtype=torch.long"),
            says("v1.worker.gpu_model_runner", "gen.set_offset(gen.get_offset() - 4)"),
        ),
        on=("continued_streams",),
    ),
    "bulk_generation": Capability(
        "each row of a batch passes vLLM's OpenAI application",
        (
            takes(f"{_RENDERER}.render_chat(conversations, chat_params, tok_params)"),
            takes(f"{_RENDERER}.render_cmpl(prompts, tok_params)"),
            has(_RENDERER, "_executor"),
            has(_CHAT, "parser_cls online_renderer"),
            takes("renderers.inputs.preprocess:parse_model_prompt(model_config, prompt)"),
            exactly(
                "entrypoints.serve.utils.api_utils:get_max_tokens(max_model_len, max_tokens, input_length,"
                " default_sampling_params, override_max_tokens, truncate_prompt_tokens)"
            ),
            exactly(
                f"{_CHAT_REQUEST}.build_chat_params(default_template, default_template_content_format)",
                new="reasoning_effort_map",  # rows that name an effort are not plain
            ),
            *(
                need
                for request in (_CHAT_REQUEST, _COMPLETION_REQUEST)
                for need in (
                    exactly(f"{request}.build_tok_params(model_config)"),
                    exactly(f"{request}.to_sampling_params(max_tokens, default_sampling_params)"),
                )
            ),
            # What these steps stand for.
            exactly(f"{_CHAT}._create_chat_completion(request, raw_request)"),
            exactly(f"{_COMPLETION}._create_completion(request, raw_request)"),
            takes(
                f"{_CHAT}.chat_completion_full_generator(request, result_generator, request_id, model_name,"
                " conversation, tokenizer, request_metadata)"
            ),
            takes(
                f"{_COMPLETION}.request_output_to_completion_response(final_res_batch, request, request_id,"
                " created_time, model_name, tokenizer, request_metadata)"
            ),
            has("sampling_params:SamplingParams", "stream_interval detokenize"),
            one_of(
                has("config", "VllmConfig.aux_output_config"),
                has("config", "ModelConfig.enable_return_routed_experts"),
            ),
            has(_GENERATING, "RequestResponseMetadata"),
            has("inputs", "EngineInput"),
            has("renderers", "merge_kwargs"),
            has("utils.mistral", "is_mistral_tokenizer"),
            has("utils", "random_uuid"),
            exactly(f"{_DETOKENIZER}:IncrementalDetokenizer.from_new_request(cls, tokenizer, request)"),
            exactly(f"{_DETOKENIZER}:IncrementalDetokenizer.update(new_token_ids, stop_terminated)"),
            _COMPLETION_OUTPUT,
        ),
        on=("direct_routes",),
    ),
    "prepared_prompts": Capability(
        "models with a preprocessor of the user's answer 501",
        (
            exactly(
                f"{_RENDERER}.render_chat_async(conversations, chat_params, tok_params, prompt_extras,"
                " skip_mm_cache)"
            ),
            exactly(f"{_RENDERER}.render_cmpl_async(prompts, tok_params, prompt_extras, skip_mm_cache)"),
            has(_RENDERER, "default_cmpl_tok_params"),
            takes("renderers.inputs.preprocess:parse_model_prompt(model_config, prompt)"),
        ),
    ),
    "adapter_versions": Capability(
        "adapters cannot be loaded; by an alias, too, the model answers under its id",
        (
            has("lora.request", "LoRARequest"),
            has(_MODELS, "lora_requests lora_id_counter"),
            exactly(f"{_MODELS}.model_name(lora_request)"),
            exactly(f"{_MODELS}.is_base_model(model_name)"),
        ),
    ),
    "adapter_layers": Capability(
        "an adapter with layers that the model does not have is served without them",
        (
            exactly("v1.engine.core:EngineCore.add_lora(lora_request)"),
            takes("v1.engine.core:EngineCore.collective_rpc(method, args)"),
            has("lora.model_manager", "LoRAModelManager.get_adapter"),
            says("lora.model_manager", "self.modules:", "self.is_pooling_model", "lora_model.loras.pop("),
            says("lora.worker_manager", "self._adapter_manager = "),
            says("v1.worker.lora_model_runner_mixin", "self.lora_manager = "),
        ),
    ),
    "structure_errors": Capability(
        "a schema, regex or grammar that cannot be used is refused without its reason",
        (
            exactly(f"{_XGRAMMAR}:validate_xgrammar_grammar(sampling_params)"),
            exactly(f"{_XGRAMMAR}:has_xgrammar_unsupported_json_features(schema)"),
            exactly(f"{_GENERATING}:validate_structural_tag_payload(payload, parameter)"),
            has("sampling_params", "SamplingParams.verify"),
            has(_MESSAGES, "create_chat_completion"),
        ),
        on=("request_limits",),
    ),
    "response_store": Capability(
        "Responses are not stored: none can be fetched or continued; streams that were cut off say completed",
        (
            exactly(f"{_RESPONSES}.create_responses(request, raw_request)"),
            exactly(f"{_RESPONSES}.retrieve_responses(response_id, starting_after, stream)"),
            has(_RESPONSES, "enable_store response_store msg_store event_store use_harmony background_tasks"),
            has("entrypoints.openai.responses.protocol", "ResponsesRequest ResponseCompletedEvent.response"),
            takes(f"{_RESPONSES}.responses_full_generator{_MADE}"),
            takes(f"{_RESPONSES}.responses_stream_generator{_MADE}"),
            exactly(f"{_RESPONSES}.responses_background_stream_generator(response_id, starting_after)"),
        ),
        on=("structure_errors",),
    ),
    "item_references": Capability(
        "input items of Responses cannot be sent as references to stored items",
        (
            has("entrypoints.openai.responses.harmony", "random_uuid"),
            has("entrypoints.openai.responses.streaming_events", "random_uuid"),
            has("entrypoints.openai.responses.utils", "random_uuid"),
        ),
        on=("response_store", "direct_routes"),
    ),
    "response_calls": Capability(
        "stored responses can be neither deleted nor asked for their input, and tokens are not counted",
        (
            takes(f"{_RESPONSES}._render_resolved_response_inputs(request, prev_response)"),
            has(_RESPONSES, "_make_not_found_error"),
        ),
        on=("response_store",),
    ),
    "strict_tools": Capability(
        "the arguments of a forced tool call may not fit its schema, unless the tool is strict",
        (
            has(_CHAT, "create_chat_completion"),
            has(_MESSAGES, "create_chat_completion"),
            exactly(f"{_RESPONSES}.create_responses(request, raw_request)"),
            has("tool_parsers.structural_tag_registry", "get_function_parameters"),
        ),
        on=("structure_errors",),
    ),
    "transcript_text": Capability(
        "response_format text of transcriptions is answered in JSON",
        (
            exactly(
                f"{_SPEECH}.transcription.serving:OpenAIServingTranscription.create_transcription(audio_data,"
                " request, raw_request)"
            ),
            exactly(
                f"{_SPEECH}.translation.serving:OpenAIServingTranslation.create_translation(audio_data,"
                " request, raw_request)"
            ),
        ),
    ),
    "media_rules": Capability(
        "media by http(s) are refused unless allowed_media_domains names their hosts",
        (
            exactly(
                "multimodal.media:MediaConnector.__init__(media_io_kwargs, connection,"
                " allowed_local_media_path, allowed_media_domains)",
                new="decoded_budget download_budget",
            ),
            exactly("multimodal.media:MediaConnector.load_from_url_async(url, media_io, fetch_timeout)"),
            exactly("multimodal.media:MediaConnector.load_from_url(url, media_io, fetch_timeout)"),
            has("multimodal.media", "ImageMediaIO.load_bytes VideoMediaIO MEDIA_CONNECTOR_REGISTRY MediaIO"),
            has("multimodal.image", "open_image"),
            has("envs", "VLLM_MAX_IMAGE_PIXELS"),
            exactly(
                "connections:HTTPConnection.async_get_bytes(url, timeout, allow_redirects, max_bytes)",
                new="request_budget",
            ),
            has("connections:HTTPConnection", "get_async_client get_bytes"),
        ),
    ),
    "cpu_workers": Capability(
        "on CPU a model cannot be split into pipeline stages, nor its experts over replicas",
        (
            has("v1.worker.cpu_worker:CPUWorker", "load_model init_device"),
            has("v1.worker.cpu_model_runner", "CPUModelRunner.intermediate_tensors"),
            has("distributed.device_communicators.cpu_communicator", "CpuCommunicator"),
            has("distributed.parallel_state", "get_pp_group"),
            has("model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts.apply"),
        ),
    ),
}
