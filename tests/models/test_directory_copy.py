"""Copies of a model directory have everything but weights, and nothing from elsewhere."""

from pipelinerl.models.directory_copy import copy_model_files

KEPT = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer.model", "tokenizer.model.v3",
    "merges.txt", "vocab.json", "qwen.tiktoken", "sentencepiece.bpe.model", "preprocessor_config.json",
    "modeling_own.py", "README.md", "LICENSE",
)  # fmt: skip
LEFT = (
    "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "value_head.safetensors",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "rust_model.ot",
    "model.onnx", "model.onnx_data", "model-q4.gguf", "model.ckpt", "weights.npz", "consolidated.00.pth",
    "model.pdparams", "optimizer.pt", "scheduler.pt", "training_args.bin", "trainer_state.json", "manifest.json",
    ".gitattributes", "original/params.json", "onnx/config.json", "trainer/trainer.json",
    ".cache/huggingface/config.json",
)  # fmt: skip


def made(directory, *names):
    for name in names:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return directory


def names_in(directory):
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def copied(model, target):
    target.mkdir()
    copy_model_files(model, target)
    assert not any(each.is_symlink() for each in target.rglob("*"))
    return names_in(target)


def test_copy_has_configuration_tokenizer_templates_code_and_licence_but_no_weights(tmp_path):
    assert copied(made(tmp_path / "model", *KEPT, *LEFT), tmp_path / "copy") == set(KEPT)
    assert (tmp_path / "copy" / "merges.txt").read_text() == "merges.txt"


def test_links_of_a_hugging_face_cache_are_followed(tmp_path):
    made(tmp_path / "hub" / "blobs", "abc")
    snapshot = made(tmp_path / "hub" / "snapshots" / "main", "config.json")
    (snapshot / "README.md").symlink_to("../../blobs/abc")
    through = tmp_path / "link"
    through.symlink_to(snapshot)
    assert copied(through, tmp_path / "copy") == {"config.json", "README.md"}
    assert (tmp_path / "copy" / "README.md").read_text() == "abc"


def test_links_to_other_files_of_the_machine_are_not_copied(tmp_path):
    made(tmp_path, "secret.txt", "private/key.jinja", "shared/tokenizer.json", "blobs/token")
    model = made(tmp_path / "model", "config.json", "LICENSE.txt")
    (model / "README.md").symlink_to(tmp_path / "secret.txt")
    (model / "NOTICE").symlink_to("../blobs/token")
    (model / "additional_chat_templates").symlink_to(tmp_path / "private")
    (model / "LICENSE").symlink_to("LICENSE.txt")
    (model / "tokenizer.json").symlink_to(tmp_path / "shared" / "tokenizer.json")
    assert copied(model, tmp_path / "copy") == {"config.json", "LICENSE.txt", "LICENSE", "tokenizer.json"}
