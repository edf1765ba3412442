"""Ray Data processors: engines as a stage of a user's pipeline.

In the order of a row: ray_stages, configs, model_configs, stage_spec, processor, user_function,
user_steps, batch_columns, row_mapping, engine_stage, row_program; shared_engine deploys one engine for
several stages.
"""
