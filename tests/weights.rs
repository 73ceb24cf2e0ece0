//! Published weight files: the list of tensors, reading and writing them, Wan2.2's originals, and damage.

use candle_core::{Device, Tensor};
use half::{bf16, f16};
use lbva_tui::config::{LingbotModelConfig, Recipe, WeightsConfig};
use lbva_tui::model::{Parameters, lingbot_parameter_specs};
use lbva_tui::random::{Draw, Purpose};
use lbva_tui::runlog::{CheckpointStore, RunDir};
use lbva_tui::train::optimizer::{AdamW, GradientSum};
use lbva_tui::weights::{Layout, Provenance, SHARD_BYTES, WeightDtype, inspect, start, write_official};
use lbva_tui::{Error, Exit, Result};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The published 5B sizes.
fn large() -> LingbotModelConfig {
    LingbotModelConfig {
        dim: 3072,
        ffn_dim: 14336,
        num_heads: 24,
        num_layers: 30,
        in_dim: 48,
        out_dim: 48,
        patch_size: [1, 2, 2],
        action_dim: 30,
        freq_dim: 256,
        text_dim: 4096,
        text_len: 512,
        eps: 1e-6,
    }
}

/// Sizes that differ from each other wherever two could be confused.
fn tiny() -> LingbotModelConfig {
    LingbotModelConfig {
        dim: 48,
        ffn_dim: 64,
        num_heads: 2,
        num_layers: 2,
        in_dim: 4,
        out_dim: 4,
        action_dim: 6,
        freq_dim: 32,
        text_dim: 16,
        ..large()
    }
}

fn values(parameters: &Parameters) -> BTreeMap<String, Vec<f32>> {
    let flat = |variable: &candle_core::Var| variable.flatten_all().unwrap().to_vec1().unwrap();
    parameters.iter().map(|(name, variable)| (name.to_owned(), flat(variable))).collect()
}

#[test]
fn the_parameters_are_those_of_the_published_checkpoint() {
    let mut published = BTreeMap::new();
    for line in include_str!("data/lingbot-va-transformer-tensors.tsv").lines() {
        let (name, shape) = line.split_once('\t').unwrap();
        let shape: Vec<usize> = shape.split(',').map(|size| size.parse().unwrap()).collect();
        assert!(published.insert(name.to_owned(), shape).is_none(), "{name} twice in the list");
    }
    let specs = lingbot_parameter_specs(&large());
    let ours: BTreeMap<_, _> = specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect();
    assert_eq!(ours, published);
    assert_eq!((specs.len(), specs.iter().map(|spec| spec.count()).sum::<usize>()), (839, 5_088_872_670));

    // The reference's own count for the sizes of its golden numbers.
    let specs = lingbot_parameter_specs(&tiny());
    assert_eq!((specs.len(), specs.iter().map(|spec| spec.count()).sum::<usize>()), (83, 96_054));
}

#[test]
fn what_nothing_depends_on_is_neither_trained_nor_decayed() {
    let specs = lingbot_parameter_specs(&tiny());
    let parameters = Parameters::initialise(&specs, 5, &Device::Cpu).unwrap();
    let all: BTreeSet<&str> = parameters.iter().map(|(name, _)| name).collect();
    let trained: BTreeSet<&str> = parameters.trained().map(|(name, _)| name).collect();
    let idle: Vec<&str> = all.difference(&trained).copied().collect();
    let text = "condition_embedder_action.text_embedder";
    assert_eq!(
        idle,
        ["1.bias", "1.weight", "2.bias", "2.weight"].map(|part| format!("{text}.linear_{part}")),
        "only the copy that no stream reads"
    );

    let before = values(&parameters);
    let mut gradients = GradientSum::default();
    let zeros =
        parameters.trained().map(|(name, variable)| (name.to_owned(), variable.zeros_like().unwrap())).collect();
    gradients.add(&zeros, 1.0).unwrap();
    let recipe: Recipe = serde_yaml::from_str(include_str!("../configs/xwam_demo.yaml")).unwrap();
    let mut config = recipe.train().clone();
    config.weight_decay = 0.5;
    let mut optimizer = AdamW::new(&parameters).unwrap();
    optimizer.update(&parameters, &gradients, &config, 0.1, 1).unwrap();
    // With gradients of zero only the decay moves a value: p <- p (1 - 0.1 x 0.5).
    for (name, after) in values(&parameters) {
        let factor = if idle.contains(&name.as_str()) { 1.0 } else { 0.95 };
        let expected: Vec<f32> = before[&name].iter().map(|value| value * factor).collect();
        assert_eq!(after, expected, "{name}");
    }
    let kept = optimizer.to_tensors(&parameters).unwrap();
    assert_eq!(kept.len(), 2 * trained.len(), "moments of trained parameters only");
    AdamW::from_tensors(&parameters, &kept).unwrap();
    // A trained parameter that gradient does not reach is a fault of the model, and said so.
    let error = optimizer.update(&parameters, &GradientSum::default(), &config, 0.1, 2).unwrap_err();
    assert!(error.what.contains("no gradient reached"), "{error}");
}

const SINGLE: &str = "diffusion_pytorch_model.safetensors";
const INDEX: &str = "diffusion_pytorch_model.safetensors.index.json";

/// Parameters of which no two tensors, and no two values, are alike: none is at its initial value.
fn scattered(config: &LingbotModelConfig) -> Parameters {
    let specs = lingbot_parameter_specs(config);
    let tensor = |name: &str, shape: &[usize]| {
        let values = Draw::new(11, Purpose::Noise, 0, name).normals(shape.iter().product());
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    };
    let tensors = specs.iter().map(|spec| (spec.name.clone(), tensor(&spec.name, &spec.shape))).collect();
    Parameters::from_tensors(&specs, tensors).unwrap()
}

fn official(path: impl AsRef<Path>) -> Result<(Parameters, Provenance)> {
    let weights = WeightsConfig::Official { path: path.as_ref().to_owned() };
    start(&weights, &lingbot_parameter_specs(&tiny()), &tiny(), 3, &|_, _| Ok(()))
}

/// The tiny model on disk in f32, in one file or in shards of about a third.
fn written(sharded: bool) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let shard_bytes = if sharded { 150_000 } else { SHARD_BYTES };
    let path = write_official(folder.path(), &scattered(&tiny()), &tiny(), WeightDtype::F32, shard_bytes).unwrap();
    (folder, path)
}

/// Tensors of a file as they are stored.
type Stored = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn load(path: &Path) -> Stored {
    let bytes = fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors
        .iter()
        .map(|(name, view)| (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect()
}

fn save(path: &Path, tensors: &Stored) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn edit(path: &Path, change: impl FnOnce(&mut Stored)) {
    let mut tensors = load(path);
    change(&mut tensors);
    save(path, &tensors);
}

fn edit_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// Relative path and content of every file below a folder.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .flat_map(|path| match path.is_dir() {
            true => contents(&path).into_iter().map(|(file, bytes)| (name(&path) + "/" + &file, bytes)).collect(),
            false => vec![(name(&path), fs::read(&path).unwrap())],
        })
        .collect()
}

#[test]
fn what_is_written_is_read_back_in_every_format() {
    let parameters = scattered(&tiny());
    let exact = values(&parameters);
    let round = |dtype: WeightDtype, value: f32| match dtype {
        WeightDtype::F32 => value,
        WeightDtype::Bf16 => bf16::from_f32(value).to_f32(),
        WeightDtype::F16 => f16::from_f32(value).to_f32(),
    };
    let mut hashes = BTreeSet::new();
    for dtype in [WeightDtype::F32, WeightDtype::Bf16, WeightDtype::F16] {
        let mut expected = exact.clone();
        expected.values_mut().flatten().for_each(|value| *value = round(dtype, *value));
        for shard_bytes in [SHARD_BYTES, 50_000] {
            let folder = TempDir::new().unwrap();
            let path = write_official(folder.path(), &parameters, &tiny(), dtype, shard_bytes).unwrap();
            let (read, provenance) = official(folder.path()).unwrap();
            assert_eq!(values(&read), expected, "{dtype}");
            assert!(provenance.drawn.is_empty());
            assert!(provenance.description.starts_with(&format!("83 tensors, {dtype} of ")), "{provenance:?}");
            hashes.insert(provenance.hash);

            let again = TempDir::new().unwrap();
            write_official(again.path(), &parameters, &tiny(), dtype, shard_bytes).unwrap();
            assert_eq!(contents(folder.path()), contents(again.path()), "the same bytes each time");

            // Another reader of the format sees the same.
            let mut theirs = BTreeMap::new();
            let shards: Vec<_> = contents(&path).into_keys().filter(|name| name.ends_with(".safetensors")).collect();
            for shard in &shards {
                for (name, tensor) in candle_core::safetensors::load(path.join(shard), &Device::Cpu).unwrap() {
                    let tensor = tensor.to_dtype(candle_core::DType::F32).unwrap();
                    theirs.insert(name, tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
                }
            }
            assert_eq!(theirs, expected);
            if shard_bytes == SHARD_BYTES {
                assert_eq!(shards, [SINGLE]);
                assert_eq!(values(&official(&path).unwrap().0), expected, "by its folder");
                assert_eq!(values(&official(path.join(SINGLE)).unwrap().0), expected, "by its file");
            } else {
                let count = shards.len();
                let names: Vec<_> = (1..=count)
                    .map(|shard| format!("diffusion_pytorch_model-{shard:05}-of-{count:05}.safetensors"))
                    .collect();
                assert!(count > 2);
                assert_eq!(shards, names);
                let index: Value = serde_json::from_slice(&fs::read(path.join(INDEX)).unwrap()).unwrap();
                assert_eq!(index["metadata"]["total_size"], 96_054 * if dtype == WeightDtype::F32 { 4 } else { 2 });
                let map = index["weight_map"].as_object().unwrap();
                assert_eq!(map.len(), 83);
                for (name, shard) in map {
                    assert!(load(&path.join(shard.as_str().unwrap())).contains_key(name), "{name}");
                }
            }
        }
    }
    assert_eq!(hashes.len(), 3, "a hash follows the values, not the files");
    // The same values stored wider are the same start.
    let (folder, wider) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    write_official(folder.path(), &parameters, &tiny(), WeightDtype::Bf16, SHARD_BYTES).unwrap();
    let (read, narrow) = official(folder.path()).unwrap();
    write_official(wider.path(), &read, &tiny(), WeightDtype::F32, SHARD_BYTES).unwrap();
    assert_eq!(official(wider.path()).unwrap().1.hash, narrow.hash);
}

#[test]
fn the_written_configuration_is_the_published_form() {
    let (_folder, path) = written(false);
    let config: Value = serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
    let expected = json!({
        "_class_name": "WanTransformer3DModel", "_diffusers_version": "0.36.0", "action_dim": 6,
        "attention_head_dim": 24, "attn_mode": "torch", "cross_attn_norm": true, "eps": 1e-6, "ffn_dim": 64,
        "freq_dim": 32, "in_channels": 4, "num_attention_heads": 2, "num_layers": 2, "out_channels": 4,
        "patch_size": [1, 2, 2], "pos_embed_seq_len": null, "rope_max_seq_len": 1024, "text_dim": 16
    });
    assert_eq!(config, expected);
}

#[test]
fn a_published_file_has_two_entries_more_and_may_mix_dtypes() {
    let (_folder, path) = written(false);
    edit(&path.join(SINGLE), |tensors| {
        for (index, (dtype, _, data)) in tensors.values_mut().enumerate() {
            let floats = data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            match index % 3 {
                0 => (*dtype, *data) = (Dtype::BF16, floats.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect()),
                1 => (*dtype, *data) = (Dtype::F16, floats.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect()),
                _ => {}
            }
        }
        tensors.insert("patch_embedding.weight".into(), (Dtype::F32, vec![48, 4, 1, 2, 2], vec![0; 4 * 768]));
        tensors.insert("patch_embedding.bias".into(), (Dtype::F32, vec![48], vec![0; 4 * 48]));
        assert_eq!(tensors.len(), 85);
    });
    // The kernel that the reference would use, and whatever it notes for itself, decide nothing.
    edit_json(&path.join("config.json"), |config| {
        config["attn_mode"] = json!("flex");
        config["_name_or_path"] = json!("elsewhere");
    });
    let (read, provenance) = official(&path).unwrap();
    assert!(provenance.description.starts_with("83 tensors, bf16 and f16 and f32 of "), "{provenance:?}");
    for (index, (name, exact)) in values(&scattered(&tiny())).into_iter().enumerate() {
        let round = |value: f32| match index % 3 {
            0 => bf16::from_f32(value).to_f32(),
            1 => f16::from_f32(value).to_f32(),
            _ => value,
        };
        let expected: Vec<f32> = exact.into_iter().map(round).collect();
        assert_eq!(values(&read)[&name], expected, "{name}");
    }
}

/// What is done to a folder, and the code and place of the error that follows.
type Damage = (bool, fn(&Path), &'static str, Exit, &'static [&'static str]);

#[test]
fn every_kind_of_damage_is_told_apart_and_located() {
    const SHARD: &str = "diffusion_pytorch_model-00001-of-00003.safetensors";
    const SECOND: &str = "diffusion_pytorch_model-00002-of-00003.safetensors";
    const NAME: &str = "blocks.0.attn1.to_k.weight";
    let damages: [Damage; 18] = [
        (false, |p| fs::remove_file(p.join(SINGLE)).unwrap(), "weights_missing", Exit::BadData, &["transformer"]),
        (false, |p| fs::write(p.join(INDEX), "{}").unwrap(), "weights_ambiguous", Exit::BadData, &["transformer"]),
        (
            false,
            |p| {
                let path = p.join(SINGLE);
                let bytes = fs::read(&path).unwrap();
                fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
            },
            "weights_corrupt",
            Exit::BadData,
            &[SINGLE],
        ),
        (false, |p| fs::write(p.join(SINGLE), "PK").unwrap(), "weights_corrupt", Exit::BadData, &[SINGLE]),
        (false, |p| fs::write(p.join(SINGLE), [b' '; 64]).unwrap(), "weights_corrupt", Exit::BadData, &[SINGLE]),
        (
            false,
            |p| fs::write(p.join(SINGLE), "version https://git-lfs.github.com/spec/v1\noid sha256:0\n").unwrap(),
            "not_openable",
            Exit::BadData,
            &[SINGLE],
        ),
        (
            false,
            |p| edit(&p.join(SINGLE), |tensors| drop(tensors.remove(NAME))),
            "tensor_missing",
            Exit::Refused,
            &[NAME, "transformer"],
        ),
        (
            false,
            |p| edit(&p.join(SINGLE), |t| drop(t.insert("lora.up".into(), (Dtype::F32, vec![1], vec![0; 4])))),
            "tensor_unexpected",
            Exit::Refused,
            &["lora.up", SINGLE],
        ),
        (
            false,
            |p| edit(&p.join(SINGLE), |t| t.get_mut("action_embedder.weight").unwrap().1.reverse()),
            "tensor_shape",
            Exit::Refused,
            &["action_embedder.weight", SINGLE],
        ),
        (
            false,
            |p| edit(&p.join(SINGLE), |t| t.get_mut(NAME).unwrap().0 = Dtype::I32),
            "tensor_dtype",
            Exit::BadData,
            &[NAME, SINGLE],
        ),
        (
            false,
            |p| {
                edit(&p.join(SINGLE), |t| {
                    t.get_mut(NAME).unwrap().2[40..44].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
                });
            },
            "tensor_not_finite",
            Exit::BadData,
            &[NAME, SINGLE],
        ),
        (true, |p| fs::remove_file(p.join(SECOND)).unwrap(), "shard_missing", Exit::BadData, &[SECOND]),
        (true, |p| fs::write(p.join(INDEX), "{\"weight_map\": 3}").unwrap(), "index_broken", Exit::BadData, &[INDEX]),
        (
            true,
            |p| edit(&p.join(SHARD), |tensors| drop(tensors.remove(NAME))),
            "tensor_not_in_shard",
            Exit::BadData,
            &[NAME, SHARD],
        ),
        (
            true,
            |p| edit_json(&p.join(INDEX), |index| drop(index["weight_map"].as_object_mut().unwrap().remove(NAME))),
            "tensor_not_in_index",
            Exit::BadData,
            &[NAME, SHARD],
        ),
        (
            true,
            |p| {
                let twice = load(&p.join(SHARD)).remove(NAME).unwrap();
                edit(&p.join(SECOND), |tensors| drop(tensors.insert(NAME.into(), twice)));
            },
            "tensor_twice",
            Exit::BadData,
            &[NAME, SECOND],
        ),
        (
            false,
            |p| edit_json(&p.join("config.json"), |config| config["num_attention_heads"] = json!(3)),
            "config_differs",
            Exit::Refused,
            &["config.json"],
        ),
        (false, |p| fs::write(p.join("config.json"), "[]").unwrap(), "config_broken", Exit::BadData, &["config.json"]),
    ];
    let mut codes = BTreeSet::new();
    for (sharded, damage, code, exit, places) in damages {
        let (_folder, path) = written(sharded);
        official(&path).unwrap();
        damage(&path);
        let error = official(&path).err().unwrap_or_else(|| panic!("{code} is not noticed"));
        assert_eq!((error.code, error.exit), (code, exit), "{error}");
        assert!(places.iter().all(|place| error.place.contains(place)), "{error}");
        codes.insert(code);
    }
    assert_eq!(codes.len(), 16);
}

#[test]
fn a_model_of_other_heads_is_refused_with_both_values() {
    let (_folder, path) = written(false);
    let mut config = tiny();
    (config.num_heads, config.eps) = (4, 0.001);
    let weights = WeightsConfig::Official { path };
    let error = start(&weights, &lingbot_parameter_specs(&config), &config, 3, &|_, _| Ok(())).unwrap_err();
    assert_eq!(
        error.what,
        "num_attention_heads is 2 in the file, 4 in the recipe; attention_head_dim is 24 in the file, 12 in the \
         recipe; eps is 1e-6 in the file, 0.001 in the recipe"
    );
}

#[test]
fn nothing_is_written_over_or_in_half() {
    let (folder, path) = written(false);
    let before = contents(folder.path());
    let parameters = scattered(&tiny());
    let write = |folder: &Path, config: &LingbotModelConfig, dtype| {
        write_official(folder, &parameters, config, dtype, SHARD_BYTES).unwrap_err().code
    };
    assert_eq!(write(folder.path(), &tiny(), WeightDtype::Bf16), "weights_exist");
    assert_eq!(contents(folder.path()), before);

    fs::remove_dir_all(path).unwrap();
    let other = LingbotModelConfig { num_layers: 1, ..tiny() };
    assert_eq!(write(folder.path(), &other, WeightDtype::F32), "weights_mismatch");
    // The largest f16 is 65504; what is larger would come back infinite.
    let (_, last) = parameters.iter().last().unwrap();
    last.set(&(last.ones_like().unwrap() * 1e5).unwrap()).unwrap();
    assert_eq!(write(folder.path(), &tiny(), WeightDtype::F16), "tensor_not_finite");
    assert!(contents(folder.path()).is_empty(), "no part is left behind");
    write_official(folder.path(), &parameters, &tiny(), WeightDtype::Bf16, SHARD_BYTES).unwrap();
}

#[test]
fn a_stop_is_heard_while_reading() {
    let (_folder, path) = written(false);
    let weights = WeightsConfig::Official { path };
    let stop = |done, total| {
        assert!(done <= total && total == 83);
        if done < 40 { Ok(()) } else { Err(Error::new(Exit::Stopped, "stopped", "someone")) }
    };
    let error = start(&weights, &lingbot_parameter_specs(&tiny()), &tiny(), 3, &stop).unwrap_err();
    assert_eq!(error.code, "stopped");
}

/// Name in Wan2.2's files, name here, shape in Wan2.2's files; written down from Wan2.2's model class.
fn wan_tensors(config: &LingbotModelConfig) -> Vec<(String, String, Vec<usize>)> {
    let (dim, ffn) = (config.dim, config.ffn_dim);
    let mut list: Vec<(String, String, Vec<usize>)> = Vec::new();
    let mut linear = |wan: &str, ours: &str, shape: &[usize]| {
        list.push((format!("{wan}.weight"), format!("{ours}.weight"), shape.to_vec()));
        list.push((format!("{wan}.bias"), format!("{ours}.bias"), vec![shape[0]]));
    };
    linear("patch_embedding", "patch_embedding_mlp", &[dim, config.in_dim, 1, 2, 2]);
    linear("text_embedding.0", "condition_embedder.text_embedder.linear_1", &[dim, config.text_dim]);
    linear("text_embedding.2", "condition_embedder.text_embedder.linear_2", &[dim, dim]);
    linear("time_embedding.0", "condition_embedder.time_embedder.linear_1", &[dim, config.freq_dim]);
    linear("time_embedding.2", "condition_embedder.time_embedder.linear_2", &[dim, dim]);
    linear("time_projection.1", "condition_embedder.time_proj", &[6 * dim, dim]);
    linear("head.head", "proj_out", &[4 * config.out_dim, dim]);
    for i in 0..config.num_layers {
        for (wan, ours) in [("self_attn", "attn1"), ("cross_attn", "attn2")] {
            for (theirs, name) in [("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")] {
                linear(&format!("blocks.{i}.{wan}.{theirs}"), &format!("blocks.{i}.{ours}.{name}"), &[dim, dim]);
            }
        }
        linear(&format!("blocks.{i}.ffn.0"), &format!("blocks.{i}.ffn.net.0.proj"), &[ffn, dim]);
        linear(&format!("blocks.{i}.ffn.2"), &format!("blocks.{i}.ffn.net.2"), &[dim, ffn]);
    }
    let mut other = |wan: String, ours: String, shape: &[usize]| list.push((wan, ours, shape.to_vec()));
    other("head.modulation".into(), "scale_shift_table".into(), &[1, 2, dim]);
    for i in 0..config.num_layers {
        other(format!("blocks.{i}.modulation"), format!("blocks.{i}.scale_shift_table"), &[1, 6, dim]);
        for part in ["weight", "bias"] {
            other(format!("blocks.{i}.norm3.{part}"), format!("blocks.{i}.norm2.{part}"), &[dim]);
        }
        for (wan, ours) in [("self_attn", "attn1"), ("cross_attn", "attn2")] {
            for norm in ["norm_q", "norm_k"] {
                other(format!("blocks.{i}.{wan}.{norm}.weight"), format!("blocks.{i}.{ours}.{norm}.weight"), &[dim]);
            }
        }
    }
    list
}

#[test]
fn wan_originals_land_where_they_belong_and_the_rest_is_drawn() {
    let (folder, config) = (TempDir::new().unwrap(), tiny());
    let path = folder.path().join(SINGLE);
    let of = |name: &str, shape: &[usize]| Draw::new(5, Purpose::Noise, 0, name).normals(shape.iter().product());
    let file: Stored = wan_tensors(&config)
        .into_iter()
        .map(|(wan, _, shape)| {
            let data = of(&wan, &shape).into_iter().flat_map(f32::to_le_bytes).collect();
            (wan, (Dtype::F32, shape, data))
        })
        .collect();
    save(&path, &file);
    let specs = lingbot_parameter_specs(&config);
    let read = |seed| {
        let weights = WeightsConfig::Wan22 { path: folder.path().to_owned() };
        start(&weights, &specs, &config, seed, &|_, _| Ok(()))
    };
    let (parameters, provenance) = read(7).unwrap();
    let ours = values(&parameters);
    for (wan, name, shape) in wan_tensors(&config) {
        assert_eq!(ours[&name], of(&wan, &shape), "{name} is {wan}");
    }
    // The convolution's [D, C, t, h, w] as a Linear over features in the order channel, time, row, column.
    let weight: Vec<Vec<f32>> = parameters.get("patch_embedding_mlp.weight").unwrap().to_vec2().unwrap();
    let convolution = of("patch_embedding.weight", &[48, 4, 1, 2, 2]);
    let at = |d: usize, c: usize, h: usize, w: usize| convolution[((d * 4 + c) * 2 + h) * 2 + w];
    for (d, c, h, w) in [(0, 0, 0, 1), (3, 2, 1, 0), (47, 3, 1, 1)] {
        assert_eq!(weight[d][c * 4 + h * 2 + w], at(d, c, h, w));
    }

    let initial = values(&Parameters::initialise(&specs, 7, &Device::Cpu).unwrap());
    let mapped: BTreeSet<String> = wan_tensors(&config).into_iter().map(|(_, name, _)| name).collect();
    let drawn: Vec<String> = ours.keys().filter(|name| !mapped.contains(*name)).cloned().collect();
    assert_eq!(drawn.len(), 14);
    assert!(drawn.iter().all(|name| {
        name.starts_with("action_embedder.")
            || name.starts_with("action_proj_out.")
            || name.starts_with("condition_embedder_action.")
    }));
    assert!(drawn.iter().all(|name| ours[name] == initial[name]), "as a run from nothing would draw them");
    let mut listed = provenance.drawn.clone();
    listed.sort();
    assert_eq!(listed, drawn);
    assert_eq!(provenance.description, format!("69 tensors, f32 of {}; 14 drawn from seed 7", folder.path().display()));
    assert_ne!(read(8).unwrap().1.hash, provenance.hash, "what is drawn counts");
    assert_eq!(read(7).unwrap().1, provenance);

    fs::write(folder.path().join("config.json"), r#"{"dim": 48, "num_heads": 3, "model_type": "ti2v"}"#).unwrap();
    let error = read(7).unwrap_err();
    assert_eq!((error.code, &*error.what), ("config_differs", "num_heads is 3 in the file, 2 in the recipe"));
    fs::remove_file(folder.path().join("config.json")).unwrap();
    edit(&path, |tensors| drop(tensors.insert("img_emb.proj.0.weight".into(), (Dtype::F32, vec![1], vec![0; 4]))));
    let error = read(7).unwrap_err();
    assert_eq!(error.code, "tensor_unexpected");
    assert!(error.place.contains("img_emb.proj.0.weight"), "{error}");
    edit(&path, |tensors| {
        tensors.remove("img_emb.proj.0.weight");
        tensors.remove("blocks.1.norm3.bias");
    });
    let error = read(7).unwrap_err();
    assert_eq!(error.code, "tensor_missing");
    assert!(error.place.contains("blocks.1.norm3.bias"), "{error}");
}

/// A file with this header and no numbers in it: what it announces is a hole in the file system.
fn hollow(path: &Path, dtype: Dtype, tensors: &[(String, Vec<usize>)]) {
    use safetensors::tensor::{Metadata, TensorInfo};
    let mut end = 0;
    let infos = tensors.iter().map(|(name, shape)| {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name.clone(), TensorInfo { dtype, shape: shape.clone(), data_offsets: (start, end) })
    });
    let header = serde_json::to_vec(&Metadata::new(None, infos.collect()).unwrap()).unwrap();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    fs::write(path, &bytes).unwrap();
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len((bytes.len() + end) as u64).unwrap();
}

#[test]
fn files_of_the_published_size_are_recognised_by_their_headers() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(SINGLE);
    let wan: Vec<_> = wan_tensors(&large()).into_iter().map(|(name, _, shape)| (name, shape)).collect();
    hollow(&path, Dtype::F32, &wan);
    let seen = inspect(&path).unwrap();
    assert_eq!((seen.layout, seen.tensors, seen.parameters), (Layout::Wan22, 825, 4_999_787_712));
    assert!(seen.fits(), "{:?}", seen.fit);

    let mut published: Vec<_> =
        lingbot_parameter_specs(&large()).into_iter().map(|spec| (spec.name, spec.shape)).collect();
    published.push(("patch_embedding.weight".into(), vec![3072, 48, 1, 2, 2]));
    published.push(("patch_embedding.bias".into(), vec![3072]));
    hollow(&path, Dtype::BF16, &published);
    let seen = inspect(folder.path()).unwrap();
    assert_eq!((seen.layout, seen.tensors), (Layout::LingbotVa, 841));
    assert!(seen.fits());
    let sizes = seen.sizes.unwrap();
    assert_eq!([sizes.dim, sizes.ffn_dim, sizes.num_layers, sizes.in_dim, sizes.out_dim], [3072, 14336, 30, 48, 48]);
    assert_eq!((sizes.action_dim, sizes.freq_dim, sizes.text_dim), (Some(30), 256, 4096));
    assert_eq!(seen.fit.unwrap().ignored, ["patch_embedding.bias", "patch_embedding.weight"]);
    assert_eq!(seen.dtypes, BTreeMap::from([("bf16".to_owned(), 841)]));

    published.retain(|(name, _)| name != "blocks.7.attn2.norm_q.weight");
    published.push(("blocks.7.attn2.norm_q.lora".into(), vec![4]));
    let (_, shape) = published.iter_mut().find(|(name, _)| name == "action_proj_out.weight").unwrap();
    shape.reverse();
    hollow(&path, Dtype::BF16, &published);
    let seen = inspect(&path).unwrap();
    assert!(!seen.fits());
    let fit = seen.fit.unwrap();
    assert_eq!(fit.missing, ["blocks.7.attn2.norm_q.weight"]);
    let other = &fit.other_shape[0];
    assert_eq!((fit.other_shape.len(), other.name.as_str()), (1, "action_proj_out.weight"));
    assert_eq!((&other.stored[..], &other.expected[..]), (&[3072, 30][..], &[30, 3072][..]));
    assert_eq!(fit.unexpected, ["blocks.7.attn2.norm_q.lora"]);

    hollow(&path, Dtype::F32, &[("conv1.weight".into(), vec![3, 3])]);
    let seen = inspect(&path).unwrap();
    assert_eq!((seen.layout, seen.fits(), seen.sizes), (Layout::Unknown, false, None));
}

fn program(arguments: &[&str]) -> (i32, String, String) {
    let output = assert_cmd::Command::cargo_bin("lbva-tui").unwrap().args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_command_shows_weights_and_what_does_not_fit() {
    let (folder, path) = written(true);
    let root = folder.path().to_str().unwrap();
    let (code, out, err) = program(&["weights", "inspect", root]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    for line in [
        "layout       LingBot-VA (weights.init: official)",
        "tensors      83 f32",
        "parameters   96,054",
        "trunk        2 blocks of 48, ffn 64",
        "streams      4 latent channels in, 4 out, patches 1x2x2; 6 action channels",
        "config.json  agrees",
        "fits         yes",
    ] {
        assert!(out.lines().any(|shown| shown == line), "{line}\n{out}");
    }
    assert_eq!(out.lines().filter(|line| line.starts_with("file ")).count(), 3);

    fs::remove_file(path.join(INDEX)).unwrap();
    let (code, _, err) = program(&["weights", "inspect", root]);
    assert_eq!(code, 65);
    assert!(err.starts_with("error: no weights lie in this folder"), "{err}");

    // Of what is missing only the first are listed for people, all for scripts.
    let (_folder, path) = written(false);
    edit(&path.join(SINGLE), |tensors| tensors.retain(|name, _| !name.starts_with("blocks.0.")));
    let path = path.to_str().unwrap();
    let (code, out, err) = program(&["weights", "inspect", "--json", path]);
    let seen: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &seen["fits"], &seen["layout"]), (78, &json!(false), &json!("lingbot_va")), "{out}");
    assert_eq!(err.lines().count(), 1, "{err}");
    assert_eq!(seen["fit"]["missing"].as_array().unwrap().len(), 27);
    assert_eq!(seen["fit"]["other_shape"], json!([]));
    let (code, out, err) = program(&["weights", "inspect", path]);
    assert_eq!(code, 78);
    assert!(out.contains("and 7 more") && out.contains("fits         no"), "{out}");
    assert!(err.starts_with("error: these are not whole weights"), "{err}");
}

/// A recipe whose model is `exported()`; everything else is as small as it may be.
const RECIPE: &str = "
family: lingbot
data:
  dataset: /data
  views: [front]
  wrist_view: front
  tile: row
  latents: videos
  frame_stride: 4
  sample: episode
  validation_episodes: [0]
  actions: {channels: [0, 1], q01: [0.0, 0.0], q99: [1.0, 1.0]}
codec: {kind: linear, path: /codec}
text: {kind: hashed_words}
model:
  {dim: 48, ffn_dim: 64, num_heads: 2, num_layers: 2, in_dim: 48, out_dim: 48, patch_size: [1, 2, 2], action_dim: 6,
   freq_dim: 32, text_dim: 16, text_len: 512, eps: 1.0e-6}
weights: {init: random}
flow:
  {video_shift: 5.0, action_shift: 1.0, train_timesteps: 1000, history_noise: 0.5, chunk: [1, 4], window: [4, 64],
   loss_mean: episodes, text_dropout: 0.1}
precision: {params: f32, residual: f32, reduce: f32, master: f32}
packing: {kind: unpacked, ranks: 1, pad_multiple: 1, pool_factor: 1, token_budget: 4096, alignment: 128}
train:
  {seed: 1, steps: 2, batch_size: 1, accumulate: 1, lr: 1.0e-4, warmup_steps: 0, decay: constant, weight_decay: 0.1,
   betas: [0.9, 0.95], adam_eps: 1.0e-8, clip_norm: 2.0, save_every: 1, keep_last: 2, keep_every: 0, resume_warmup: 50,
   recompute: false}
validation: {every: 1, clips: 1, chunk: 2, window: 4, sample_steps: 1, strips: 0}
";

fn exported() -> LingbotModelConfig {
    LingbotModelConfig { in_dim: 48, out_dim: 48, ..tiny() }
}

#[test]
fn a_checkpoint_is_exported_in_the_published_layout() {
    let folder = TempDir::new().unwrap();
    let run = RunDir::new(folder.path().join("runs/arm"));
    fs::create_dir_all(run.root()).unwrap();
    fs::write(run.arm_yaml(), RECIPE).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let root = text(run.root());
    let out = |name: &str| text(&folder.path().join(name));
    let export = |arguments: &[&str]| program(&[&["weights", "export"], arguments].concat());

    let (code, _, err) = export(&[&root, &out("none")]);
    assert_eq!(code, 65);
    assert!(err.contains("no complete checkpoint"), "{err}");

    // Two checkpoints as training leaves them: weights without a config.json.
    let parameters = scattered(&exported());
    let store = CheckpointStore::new(&run);
    for step in [1, 2] {
        let publish = |staged: &Path| {
            write_official(staged, &parameters, &exported(), WeightDtype::F32, SHARD_BYTES)?;
            fs::remove_file(staged.join("transformer/config.json")).unwrap();
            Ok(())
        };
        store.publish(step, Value::Null, publish).unwrap();
        let (_, last) = parameters.iter().last().unwrap();
        last.set(&(last.as_tensor() + 1.0).unwrap()).unwrap();
    }

    let read = |path: &str| {
        let weights = WeightsConfig::Official { path: path.into() };
        let specs = lingbot_parameter_specs(&exported());
        values(&start(&weights, &specs, &exported(), 0, &|_, _| Ok(())).unwrap().0)
    };
    let (code, shown, err) = export(&[&root, &out("newest"), "--dtype", "f32"]);
    assert_eq!((code, err.as_str()), (0, ""), "{shown}");
    assert!(shown.starts_with("step         2\n") && shown.contains("config.json  agrees"), "{shown}");
    let newest = read(&out("newest"));
    let (code, shown, _) = export(&[&text(&run.checkpoint(1)), &out("first"), "--dtype", "f32", "--json"]);
    let document: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((code, &document["step"], &document["written"]["tensors"]), (0, &json!(1), &json!(83)));
    let first = read(&out("first"));
    let (name, last) = newest.iter().last().unwrap();
    assert_eq!(*last, first[name].iter().map(|value| value + 1.0).collect::<Vec<_>>());
    assert_eq!(export(&[&root, &out("published")]).0, 0);
    for (name, published) in read(&out("published")) {
        let rounded: Vec<f32> = newest[&name].iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
        assert_eq!(published, rounded, "bf16 unless asked otherwise");
    }

    let refused = |arguments: &[&str], code: i32, words: &str| {
        let (found, _, err) = export(arguments);
        assert_eq!(found, code, "{err}");
        assert!(err.contains(words), "{err}");
    };
    refused(&[&root, &out("newest")], 78, "there are weights already");
    refused(&[&out("newest"), &out("other")], 65, "neither a run nor a checkpoint inside one");
    refused(&[&root, &out("other"), "--read-only"], 2, "--read-only");
    fs::write(run.arm_yaml(), include_str!("../configs/xwam_demo.yaml")).unwrap();
    refused(&[&root, &out("other")], 78, "family");
    assert!(!folder.path().join("other").exists());
}
