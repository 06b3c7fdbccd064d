def test_x(oracle, prompts, tiny_config):
    from tests.oracle import example_prompts, generate
    r = generate(oracle, example_prompts(prompts)["text"], max_frames=10)
    assert r.codes.shape == (9, 16)
    print(r.talker_prompt.shape, r.talker_positions.shape, r.talker_inputs.shape, r.codec_logits.shape, r.accept_rows.shape, r.first_codes)
