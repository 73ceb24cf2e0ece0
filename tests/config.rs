//! Configuration end to end: the committed recipes and the experiment, and one test for each class of bad input.

use lbva_tui::config::{self, Experiment, Recipe, XwamRecipe};
use lbva_tui::{Error, Exit, model};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn demo_recipe() -> XwamRecipe {
    xwam(&config::load(&repository("configs/xwam_demo.yaml")).unwrap())
}

fn xwam(recipe: &Recipe) -> XwamRecipe {
    recipe.xwam("the test").unwrap().clone()
}

fn demo_text() -> String {
    fs::read_to_string(repository("tests/fixtures/recipe.yaml")).unwrap()
}

/// Loads the demo recipe after a textual change.
fn load_changed(from: &str, to: &str) -> Result<Recipe, Error> {
    let text = demo_text();
    assert!(text.contains(from), "the demo recipe has no {from:?}");
    load_bytes(text.replacen(from, to, 1).as_bytes())
}

fn load_bytes(bytes: &[u8]) -> Result<Recipe, Error> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("x.yaml");
    fs::write(&path, bytes).unwrap();
    config::load(&path).map_err(|mut error| {
        error.place = error.place.replace(&format!("{}/", folder.path().display()), "");
        error
    })
}

fn refused(result: Result<Recipe, Error>) -> (&'static str, String) {
    let error = result.unwrap_err();
    assert_eq!(error.exit, Exit::Refused, "{error}");
    let line = error.to_string();
    assert!(!line.contains('\n'));
    (error.code, line)
}

/// A folder with the demo experiment, its files changed by `change`.
fn experiment(change: impl Fn(&str, String) -> String) -> (TempDir, PathBuf) {
    let root = TempDir::new().unwrap();
    for file in ["configs/xwam_demo.yaml", "experiments/demo/experiment.yaml"] {
        let target = root.path().join(file);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        let source = if file.ends_with("xwam_demo.yaml") { "tests/fixtures/recipe.yaml" } else { file };
        fs::write(target, change(file, fs::read_to_string(repository(source)).unwrap())).unwrap();
    }
    let directory = root.path().join("experiments/demo");
    (root, directory)
}

fn changed_experiment(from: &str, to: &str) -> Error {
    let (_root, directory) = experiment(|file, text| {
        if file.ends_with("experiment.yaml") {
            assert!(text.contains(from), "the experiment has no {from:?}");
            text.replacen(from, to, 1)
        } else {
            text
        }
    });
    Experiment::load(&directory).unwrap_err()
}

#[test]
fn every_committed_recipe_loads_and_survives_its_canonical_text() {
    for entry in fs::read_dir(repository("configs")).unwrap() {
        let recipe = config::load(&entry.unwrap().path()).unwrap();
        let again: Recipe = serde_yaml::from_str(&recipe.to_yaml()).unwrap();
        assert_eq!(again, recipe);
        assert_eq!(load_bytes(recipe.to_yaml().as_bytes()).unwrap(), recipe);
    }
}

#[test]
fn the_5b_recipe_has_the_published_number_of_parameters() {
    let recipe = config::load(&repository("configs/xwam_5b.yaml")).unwrap();
    let count = model::count(&recipe);
    assert_eq!(count.total(), 5_037_748_446);
    let blocks = count.base.iter().find(|part| part.name == "blocks").unwrap();
    assert_eq!(blocks.parameters, 30 * 163_656_704);
    assert_eq!(count.geometry_total(), 0);

    let mut with_branch = xwam(&recipe);
    with_branch.model.geometry.enabled = true;
    let recipe = Recipe::Xwam(with_branch);
    let count = model::count(&recipe);
    let dim = 3072_u64;
    assert_eq!(count.base_total(), 5_037_748_446);
    let parameters: Vec<u64> = count.geometry.iter().map(|part| part.parameters).collect();
    let adapter = 2 * 2048 + 2048 * dim + dim + 2 * dim;
    assert_eq!(parameters, [adapter, 10 * (4 * (dim * dim + dim) + 2 * dim)]);
}

#[test]
fn parameter_names_and_shapes_are_those_of_the_public_model() {
    let mut recipe = demo_recipe();
    let model = &mut recipe.model;
    (model.dim, model.ffn_dim, model.num_heads, model.num_layers) = (96, 160, 3, 3);
    (model.in_dim, model.out_dim, model.text_dim, model.text_len, model.freq_dim) = (6, 6, 24, 24, 64);
    let mut ours: Vec<String> = model::parameter_specs(model)
        .into_iter()
        .map(|spec| format!("{}\t{}", spec.name, spec.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")))
        .collect();
    ours.sort();
    let public = fs::read_to_string(repository("tests/fixtures/xwam_tensor_shapes.tsv")).unwrap();
    let public: Vec<&str> = public.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(ours, public);
    // Every parameter belongs to one part, and to one only.
    assert_eq!(model::count(&Recipe::Xwam(recipe)).total(), 451_446);
}

#[test]
fn the_committed_experiment_has_two_arms_that_differ_in_the_ablated_field_alone() {
    let experiment = Experiment::load(&repository("experiments/demo")).unwrap();
    assert_eq!(experiment.ablated, ["model.geometry.enabled"]);
    let [baseline, candidate] = &experiment.arms[..] else { panic!("two arms") };
    assert_eq!((baseline.name.as_str(), candidate.name.as_str()), ("m1_baseline", "m2_geometry"));
    let (left, right) = (baseline.recipe.flatten(), candidate.recipe.flatten());
    assert_eq!(left.len(), right.len());
    let different: Vec<&str> =
        left.iter().zip(&right).filter(|(left, right)| left != right).map(|(left, _)| left.0.as_str()).collect();
    assert_eq!(different, ["model.geometry.enabled"]);
}

/// Computed here once more, field by field, without the loader's own comparison.
#[test]
fn the_arms_of_every_committed_experiment_differ_in_exactly_what_is_ablated() {
    for entry in fs::read_dir(repository("experiments")).unwrap() {
        let experiment = Experiment::load(&entry.unwrap().path()).unwrap();
        for (index, left) in experiment.arms.iter().enumerate() {
            for right in &experiment.arms[..index] {
                let (left, right) = (left.recipe.flatten(), right.recipe.flatten());
                assert_eq!(left.len(), right.len());
                let pairs = left.iter().zip(&right).filter(|(left, right)| left != right);
                let different: Vec<&str> = pairs.map(|(left, _)| left.0.as_str()).collect();
                assert_eq!(different, experiment.ablated, "{}", experiment.name);
            }
        }
    }
}

#[test]
fn the_packing_experiment_has_three_arms_that_differ_in_the_packing_alone() {
    let experiment = Experiment::load(&repository("experiments/packing")).unwrap();
    let names: Vec<&str> = experiment.arms.iter().map(|arm| arm.name.as_str()).collect();
    assert_eq!(
        (names, experiment.ablated.join(" ")),
        (vec!["unpacked", "bucket", "budget"], "packing.kind".to_owned())
    );
    assert!(experiment.arms_start_equal());
    let kinds = experiment.arms.iter().map(|arm| arm.recipe.lingbot("the test").unwrap().packing.kind);
    assert_eq!(
        kinds.collect::<Vec<_>>(),
        [config::PackingKind::Unpacked, config::PackingKind::Bucket, config::PackingKind::Budget]
    );
    // However they are packed, a step trains on as many episodes.
    assert!(experiment.arms.iter().all(|arm| arm.recipe.samples_per_step() == 8));
}

#[test]
fn the_furniture_recipes_train_128_episodes_a_step() {
    for (file, kind) in [("e128", config::PackingKind::Unpacked), ("e128_pack", config::PackingKind::Bucket)] {
        let recipe = config::load(&repository(&format!("configs/furniture_all_{file}.yaml"))).unwrap();
        assert_eq!(recipe.samples_per_step(), 128);
        assert_eq!(model::count(&recipe).total(), 5_088_872_670);
        assert_eq!(recipe.lingbot("the test").unwrap().packing.kind, kind);
    }
}

#[test]
fn a_head_whose_third_is_odd_cannot_turn() {
    let file = repository("configs/lingbot_tiny.yaml");
    let codes =
        |dim: &str| config::load_with(&file, &[format!("model.dim={dim}")]).map(|_| ()).map_err(|e| e.to_string());
    assert_eq!(codes("192"), Ok(()));
    let error = codes("256").unwrap_err();
    assert!(error.contains("a third of the head size 64"), "{error}");
}

#[test]
fn relative_paths_resolve_against_the_file_that_names_them() {
    let recipe = demo_recipe();
    let root = fs::canonicalize(repository("")).unwrap();
    assert_eq!(recipe.data.dataset, root.join("experiments/demo/data/robosuite_lift"));
    assert_eq!(recipe.codec, config::CodecConfig::Linear { path: root.join("experiments/demo/codec.safetensors") });

    // An arm's path belongs to the experiment file, the command line's to the current folder.
    let (_root, directory) = experiment(|file, text| match file.ends_with("experiment.yaml") {
        true => text.replace("ablated: [", "ablated: [data.dataset, ").replace(
            "      model.geometry.enabled: true",
            "      model.geometry.enabled: true\n      data.dataset: other",
        ),
        false => text,
    });
    let experiment = Experiment::load(&directory).unwrap();
    let directory = fs::canonicalize(directory).unwrap();
    assert_eq!(experiment.arms[1].recipe.dataset(), directory.join("other"));
    let experiment = Experiment::load_with(&experiment.directory, &["codec.path=c.safetensors".to_owned()]).unwrap();
    let here = fs::canonicalize(".").unwrap().join("c.safetensors");
    assert_eq!(*experiment.arms[0].recipe.codec(), config::CodecConfig::Linear { path: here });
}

#[test]
fn unknown_keys_are_named_with_their_path_line_and_nearest_key() {
    let line = 1 + demo_text().lines().position(|line| line.contains("warmup_steps")).unwrap();
    let (code, text) = refused(load_changed("warmup_steps:", "warmup_step:"));
    assert_eq!(code, "unknown_key");
    assert_eq!(text, format!("unknown key train.warmup_step (x.yaml line {line}); did you mean warmup_steps?"));

    let (_, text) = refused(load_changed("    token_dim: 32", "    tokendim: 32"));
    assert!(text.starts_with("unknown key model.geometry.tokendim (x.yaml line "), "{text}");
    assert!(text.ends_with("did you mean token_dim?"), "{text}");

    // Nothing near: the keys that may stand there.
    let (_, text) = refused(load_changed("device: auto", "qqqqqqqq: 1"));
    assert!(text.contains("keys here: family, data, codec"), "{text}");
    // The right key at the wrong level.
    let (_, text) = refused(load_changed("device: auto", "adam_eps: 1"));
    assert!(text.ends_with("did you mean train.adam_eps?"), "{text}");
}

#[test]
fn unknown_keys_of_tagged_sections_are_refused_even_where_the_choice_has_no_fields() {
    let (code, text) = refused(load_changed("kind: hashed_words", "kind: hashed_words\n  path: x"));
    assert_eq!((code, text.split(" (").next().unwrap()), ("unknown_key", "unknown key text.path"));
    let (code, text) = refused(load_changed("kind: linear", "kind: linear\n  paht: x"));
    assert_eq!((code, text.split(" (").next().unwrap()), ("unknown_key", "unknown key codec.paht"));
    assert!(text.ends_with("did you mean path?"), "{text}");
}

#[test]
fn wrong_types_name_the_field_what_was_expected_and_what_was_found() {
    for (from, to, sentence) in [
        ("lr: 1.0e-3", "lr: fast", "train.lr: expected a number, found the string \"fast\""),
        ("steps: 400", "steps: -1", "train.steps: expected a whole number, 0 or more, found the number -1"),
        ("steps: 400", "steps: 1.5", "train.steps: expected a whole number, 0 or more, found the number 1.5"),
        ("steps: 400", "steps:", "train.steps: expected a whole number, 0 or more, found nothing"),
        ("recompute: false", "recompute: 0", "train.recompute: expected true or false, found the number 0"),
        ("betas: [0.9, 0.999]", "betas: [0.9]", "train.betas: expected a list of 2, found a list of 1"),
        ("betas: [0.9, 0.999]", "betas: [0.9, 1, 2]", "train.betas: expected a list of 2, found a list of 3"),
        ("betas: [0.9, 0.999]", "betas: [0.9, x]", "train.betas[1]: expected a number, found the string \"x\""),
        ("grid: [8, 8]", "grid: 8", "model.geometry.grid: expected a list of 2, found the number 8"),
        ("path: ../experiments/demo/codec.safetensors", "path: 5", "codec.path: expected a path, found the number 5"),
        ("family: xwam", "family: [xwam]", "family: expected a name, found a list"),
    ] {
        let (code, text) = refused(load_changed(from, to));
        assert_eq!((code, text.split(" (x.yaml").next().unwrap()), ("wrong_type", sentence));
    }
    let (code, text) = refused(load_changed("family: xwam", "family: xwan"));
    assert_eq!(code, "unknown_choice");
    assert_eq!(text, "family: unknown choice \"xwan\" (x.yaml line 3); did you mean xwam?");
    let (code, text) = refused(load_changed("kind: linear", "kind: pca"));
    assert_eq!(code, "unknown_choice");
    assert!(text.contains("one of: linear, wan_vae"), "{text}");
    // A section that is a scalar, and a file that is no mapping.
    assert_eq!(
        refused(load_bytes(b"family: xwam\ndata: 3\n")).1,
        "data: expected a mapping of keys, found the number 3 (x.yaml line 2)"
    );
    assert_eq!(refused(load_bytes(b"- 1\n")).0, "wrong_type");
    assert_eq!(refused(load_bytes(b"hello\n")).0, "wrong_type");
}

#[test]
fn missing_keys_are_named_with_their_section() {
    let line = 1 + demo_text().lines().position(|line| line == "train:").unwrap();
    let (code, text) = refused(load_changed("  lr: 1.0e-3\n", ""));
    assert_eq!((code, text), ("missing_key", format!("missing key train.lr (x.yaml line {line})")));
    assert_eq!(
        refused(load_changed("  kind: hashed_words", "  {}")).1.split(" (").next().unwrap(),
        "missing key text.kind"
    );
    assert_eq!(refused(load_changed("family: xwam", "")).1, "missing key family (x.yaml)");
    // Only the device has a default.
    assert_eq!(load_changed("device: auto", "").unwrap().device(), &config::DeviceChoice::Auto);
}

#[test]
fn duplicate_keys_are_refused_at_their_own_line() {
    let line = 1 + demo_text().lines().position(|line| line.contains("  lr:")).unwrap();
    let (code, text) = refused(load_changed("  lr: 1.0e-3", "  lr: 1.0e-3\n  lr: 2.0e-3"));
    assert_eq!(
        (code, text),
        ("duplicate_key", format!("train.lr stands twice (x.yaml line {}); keep one of the two", line + 1))
    );
    assert_eq!(refused(load_bytes(b"family: xwam\nfamily: xwam\n")).0, "duplicate_key");
}

#[test]
fn files_that_are_no_recipe_are_refused_each_in_its_own_words() {
    let error = config::load(Path::new("no/such.yaml")).unwrap_err();
    assert_eq!((error.exit, error.code), (Exit::Refused, "file_missing"));
    assert_eq!(error.to_string(), "no such file (no/such.yaml)");
    assert_eq!(config::load(&repository("configs")).unwrap_err().code, "unreadable");
    for empty in ["", "\n\n", "# only a comment\n", "---\n", "~\n"] {
        assert_eq!(refused(load_bytes(empty.as_bytes())).0, "empty_file", "{empty:?}");
    }
    let (code, text) = refused(load_bytes(b"family: xwam\ndata: \xff\n"));
    assert_eq!((code, text.as_str()), ("not_text", "not UTF-8 text (x.yaml line 2); save the file as UTF-8"));
    let (code, text) = refused(load_bytes(b"train:\n\tlr: 1\n"));
    assert_eq!(
        (code, text.as_str()),
        ("bad_yaml", "a tab in the indentation (x.yaml line 2); YAML indents with spaces")
    );
    for broken in
        ["a: [1, 2\n", "a: b: c\n", "a: \"x\n", "a: &x\nb: *y\n", "{a: 1}}\n", "a: !tag 1\n", "a: 1\n---\nb: 2\n", "\0"]
    {
        let (code, text) = refused(load_bytes(broken.as_bytes()));
        assert_eq!(code, "bad_yaml", "{broken:?}: {text}");
    }
    // Depth and expansion bombs end in an error, not in a dead process.
    assert_eq!(refused(load_bytes("[".repeat(100_000).as_bytes())).0, "bad_yaml");
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..12 {
        let previous = format!("*a{}", level - 1);
        bomb += &format!("a{level}: &a{level} [{}]\n", vec![previous; 9].join(", "));
    }
    assert_eq!(refused(load_bytes(bomb.as_bytes())).0, "bad_yaml");
    // A byte order mark and Windows line ends are harmless.
    let windows = format!("\u{feff}{}", demo_text().replace('\n', "\r\n"));
    let plain = load_bytes(demo_text().as_bytes()).unwrap();
    assert_eq!(load_bytes(windows.as_bytes()).unwrap(), plain);
}

#[test]
fn overrides_are_judged_like_the_file() {
    let path = repository("configs/xwam_demo.yaml");
    let set = |overrides: &[&str]| {
        config::load_with(&path, &overrides.iter().map(|&text| text.to_owned()).collect::<Vec<_>>())
    };
    let recipe = set(&["train.lr=1e-4", "train.steps = 3", "data.validation_episodes=[1]", "device=cpu"]).unwrap();
    let recipe = xwam(&recipe);
    assert_eq!((recipe.train.lr, recipe.train.steps), (1e-4, 3));
    assert_eq!((recipe.data.validation_episodes, recipe.device), (vec![1], config::DeviceChoice::Cpu));
    // The last one counts.
    assert_eq!(set(&["train.steps=3", "train.steps=4"]).unwrap().train().steps, 4);

    for (overrides, code, line) in [
        (&["train.lrr=1"][..], "unknown_key", "unknown key train.lrr (--set train.lrr=1); did you mean lr?"),
        (&["trian.lr=1"], "unknown_key", "unknown key trian.lr (--set trian.lr=1); did you mean train?"),
        (&["lr=1"], "unknown_key", "unknown key lr (--set lr=1); did you mean train.lr?"),
        (
            &["train.lr=fast"],
            "wrong_type",
            "train.lr: expected a number, found the string \"fast\" (--set train.lr=fast)",
        ),
        (&["train.lr.x=1"], "unknown_key", "train.lr is no mapping: it has no keys (--set train.lr.x=1)"),
        (&["train.steps=0"], "bad_value", "train.steps: must be at least 1 (--set train.steps=0)"),
        (&["train.lr"], "bad_override", "not of the form key=value (--set train.lr); for example --set train.lr=1e-4"),
        (&["=3"], "bad_override", "not of the form key=value (--set =3); for example --set train.lr=1e-4"),
    ] {
        let error = set(overrides).unwrap_err();
        assert_eq!((error.exit, error.code, error.to_string().as_str()), (Exit::Usage, code, line));
    }
    assert_eq!(set(&["train.betas=[1"]).unwrap_err().code, "bad_override");
}

#[test]
fn values_that_cannot_work_are_refused_with_field_and_line() {
    for (from, to, sentence) in [
        ("num_heads: 4", "num_heads: 5", "model.num_heads: dim 128 does not divide by 5 heads"),
        (
            "num_heads: 4",
            "num_heads: 128",
            "model.num_heads: head size 1 (dim 128 / 128 heads) must be even and at least 6",
        ),
        ("num_heads: 4", "num_heads: 0", "model.num_heads: expected a size from 1 to 1000000, found 0"),
        (
            "dim: 128",
            "dim: 18446744073709551615",
            "model.dim: expected a size from 1 to 1000000, found 18446744073709551615",
        ),
        ("num_views: 3", "num_views: 2", "model.num_views: 2 is not the number of data.views, 3"),
        ("in_dim: 48", "in_dim: 16", "model.in_dim: the codec has 48 latent channels, found 16"),
        ("patch_size: [1, 2, 2]", "patch_size: [2, 2, 2]", "model.patch_size: a patch spans one latent frame, found 2"),
        ("action_dim: 14", "action_dim: 12", "model.action_dim: each arm has 7 dims, found 12"),
        (
            "proprio_dim: 16",
            "proprio_dim: 8",
            "model.proprio_dim: room for 1 arms, where model.action_dim has room for 2",
        ),
        (
            "action_num: 4",
            "action_num: 3",
            "model.action_num: data.frame_skip 4 does not divide into 3 actions a frame",
        ),
        (
            "frames: 9",
            "frames: 8",
            "data.frames: must be 4k + 1 with k of 1 or more (the first frame alone, then groups of four), found 8",
        ),
        (
            "frames: 9",
            "frames: 1",
            "data.frames: must be 4k + 1 with k of 1 or more (the first frame alone, then groups of four), found 1",
        ),
        (
            "layers: [0, 2, 4]",
            "layers: [0, 2, 6]",
            "model.geometry.layers: block 6 does not exist: model.num_layers is 6",
        ),
        ("layers: [0, 2, 4]", "layers: [0, 0]", "model.geometry.layers: must rise, each block once"),
        ("betas: [0.9, 0.999]", "betas: [0.9, 1.0]", "train.betas: must lie between 0 and 1, 1 excluded, found 1"),
        ("lr: 1.0e-3", "lr: .nan", "train.lr: must be greater than 0, found NaN"),
        ("lr: 1.0e-3", "lr: .inf", "train.lr: must be greater than 0, found inf"),
        ("text_dropout: 0.1", "text_dropout: 1.1", "flow.text_dropout: must lie between 0 and 1, found 1.1"),
        (
            "action_steps: 4",
            "action_steps: 9",
            "validation.action_steps: actions finish first: at most validation.sample_steps 8, found 9",
        ),
        ("strips: 4", "strips: 40", "validation.strips: at most validation.clips 16, found 40"),
        ("keep_last: 2", "keep_last: 0", "train.keep_last: must be at least 1"),
        (
            "keep_every: 0",
            "keep_every: 150",
            "train.keep_every: must be 0 or a multiple of train.save_every 100, found 150",
        ),
        (
            "state_gripper: [14, 15]",
            "state_gripper: []",
            "data.robot.state_gripper: expected one column, or two whose difference is the opening; found 0",
        ),
        (
            "state_gripper: [14, 15]",
            "state_gripper: [14, 18446744073709551615]",
            "data.robot.state_gripper: 18446744073709551615 is no column number",
        ),
        (
            "state_position: 7",
            "state_position: 9",
            "data.robot.state_quaternion_xyzw: columns 10..14 overlap the position's, 9..12",
        ),
    ] {
        let (code, text) = refused(load_changed(from, to));
        assert_eq!((code, text.split(" (x.yaml").next().unwrap()), ("bad_value", sentence));
        assert!(text.contains("(x.yaml line "), "{text}");
    }
    let (_, text) = refused(load_changed("wrist_view: observation.images.eye_in_hand_rgb", "wrist_view: wrist"));
    assert!(text.starts_with("data.wrist_view: wrist is not one of data.views"), "{text}");
    // The first problem says how many more there are; `validate` lists them.
    let mut recipe = demo_recipe();
    (recipe.train.lr, recipe.train.steps, recipe.model.freq_dim) = (0.0, 0, 7);
    let fields: Vec<String> =
        config::validate(&Recipe::Xwam(recipe.clone())).into_iter().map(|problem| problem.place).collect();
    assert_eq!(fields, ["model.freq_dim", "train.steps", "train.lr"]);
    let text = demo_text().replace("lr: 1.0e-3", "lr: 0").replace("keep_last: 2", "keep_last: 0");
    let (_, text) = refused(load_bytes(text.as_bytes()));
    assert!(text.ends_with("1 more problem: run check"), "{text}");
}

#[test]
fn images_must_fill_whole_patches() {
    let recipe = demo_recipe();
    assert!(config::validate_image_size(recipe.model.patch_size, 128, 128).is_empty());
    let problems = config::validate_image_size(recipe.model.patch_size, 120, 0);
    assert_eq!(problems.len(), 2);
    assert!(problems[0].to_string().contains("image height 120 is no multiple of 32"), "{}", problems[0]);
}

#[test]
fn arms_must_differ_in_exactly_the_ablated_fields() {
    let error = changed_experiment(
        "      model.geometry.enabled: true",
        "      model.geometry.enabled: true\n      train.lr: 2.0e-3",
    );
    assert_eq!((error.exit, error.code), (Exit::Refused, "arms_differ"));
    assert_eq!(
        error.what,
        "m1_baseline and m2_geometry differ in train.lr (0.001 against 0.002), which is not ablated"
    );

    let error = changed_experiment("      model.geometry.enabled: true", "      model.geometry.enabled: false");
    assert_eq!((error.exit, error.code), (Exit::Refused, "ablation_missing"));
    assert_eq!(
        error.what,
        "m1_baseline and m2_geometry do not differ in the ablated field model.geometry.enabled (both false)"
    );

    let error = changed_experiment("[model.geometry.enabled]", "[model.geometry.enabled, train.lr]");
    assert_eq!(error.code, "ablation_missing");
    let error = changed_experiment("[model.geometry.enabled]", "[model.geometry.enable]");
    assert_eq!(error.code, "unknown_key");
    assert!(error.to_string().contains("did you mean model.geometry.enabled?"), "{error}");

    // An override on the command line that makes the arms alike is caught as well.
    let experiment = Experiment::load(&repository("experiments/demo")).unwrap();
    let error = Experiment::load_with(&experiment.directory, &["model.geometry.enabled=true".to_owned()]).unwrap_err();
    assert_eq!(error.code, "ablation_missing");
    assert_eq!(
        Experiment::load_with(&experiment.directory, &["train.steps=5".to_owned()]).unwrap().arms[1]
            .recipe
            .train()
            .steps,
        5
    );
}

#[test]
fn a_group_of_fields_may_be_ablated_whole() {
    let (_root, directory) = experiment(|_, text| {
        text.replace("[model.geometry.enabled]", "[model.geometry]").replace(
            "      model.geometry.enabled: true",
            "      model.geometry.enabled: true\n      model.geometry.seed: 8",
        )
    });
    assert_eq!(xwam(&Experiment::load(&directory).unwrap().arms[1].recipe).model.geometry.seed, 8);
}

#[test]
fn experiment_files_have_their_own_mistakes() {
    for (from, to, code, start) in [
        ("ablated:", "ablate:", "unknown_key", "unknown key ablate ("),
        ("  - name: m2_geometry", "  - nam: m2_geometry", "unknown_key", "unknown key arms[1].nam ("),
        (
            "      model.geometry.enabled: true",
            "      model.geometry.enable: true",
            "unknown_key",
            "unknown key model.geometry.enable (",
        ),
        (
            "      model.geometry.enabled: true",
            "      model.geometry.enabled: yes please",
            "wrong_type",
            "model.geometry.enabled: expected true or false",
        ),
        ("xwam_demo.yaml", "absent.yaml", "file_missing", "base names "),
        ("baseline: m1_baseline", "baseline: m1", "bad_value", "decision.baseline: m1 is no arm"),
        ("candidate: m2_geometry", "candidate: m1_baseline", "bad_value", "decision.candidate: the same arm"),
        ("metric: wrist_lpips", "metric: wrist_psnr", "bad_value", "decision.metric: only wrist_lpips decides"),
        ("confidence: 0.95", "confidence: 95", "bad_value", "decision.confidence: must lie between"),
        ("resamples: 2000", "resamples: 1", "bad_value", "decision.resamples: must be from"),
        ("- name: m1_baseline", "- name: ../up", "bad_value", "arms[0].name: \"../up\" is no folder name"),
        ("- name: m1_baseline", "- name: m2_geometry", "bad_value", "arms: m2_geometry stands twice"),
        ("- name: m1_baseline", "- name: ''", "bad_value", "arms[0].name: \"\" is no folder name"),
        ("ablated: [model.geometry.enabled]", "ablated: []", "bad_value", "ablated: name at least one"),
    ] {
        let error = changed_experiment(from, to);
        assert_eq!((error.exit, error.code), (Exit::Refused, code), "{error}");
        assert!(error.to_string().starts_with(start), "{error}");
        assert!(error.to_string().contains("experiment.yaml line "), "{error}");
    }
    let error = Experiment::load(&repository("no/such")).unwrap_err();
    assert_eq!((error.code, error.what.as_str()), ("no_experiment", "no such experiment"));
    let error = Experiment::load(&repository("configs")).unwrap_err();
    assert_eq!((error.code, error.what.as_str()), ("no_experiment", "no experiment.yaml in this folder"));
    let experiment = Experiment::load(&repository("experiments/demo/experiment.yaml")).unwrap();
    let error = experiment.arm("m2_geometri").unwrap_err();
    assert_eq!(error.to_string(), "experiment demo has no arm m2_geometri; did you mean m2_geometry?");
    assert_eq!(error.exit, Exit::Usage);
}

#[test]
fn every_problem_of_an_experiment_is_listed_once() {
    let (_root, directory) = experiment(|file, text| match file.ends_with("experiment.yaml") {
        true => text.replace("confidence: 0.95", "confidence: 2"),
        false => text.replace("lr: 1.0e-3", "lr: 0").replace("num_views: 3", "num_views: 4"),
    });
    let examination = config::examine(&directory, &[]);
    let codes: Vec<&str> = examination.problems.iter().map(|problem| problem.code).collect();
    assert_eq!(codes, ["bad_value"; 3], "{:?}", examination.problems);
    assert_eq!(examination.experiment.unwrap().arms.len(), 2);
    let error = Experiment::load(&directory).unwrap_err();
    assert!(error.to_string().ends_with("2 more problems: run check"), "{error}");
}
