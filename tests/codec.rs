//! The linear codec on the demo's data: how well it codes, and that a fit is reproducible.

mod recipes;

use lbva_tui::codec::{
    self, CHANNELS, Extent, FitSettings, LatentCache, LatentCodec, LinearCodec, decode_view, encode_clip, fit_and_save,
    held_out_quality,
};
use lbva_tui::config::CodecConfig;
use lbva_tui::data::Dataset;
use lbva_tui::{Error, Exit};
use std::path::PathBuf;
use std::sync::Mutex;

const HELD_OUT: [usize; 6] = [7, 11, 14, 16, 19, 24];

fn demo() -> Dataset {
    let root = recipes::repository("experiments/demo/data/robosuite_lift");
    Dataset::open(&recipes::data(&root, &HELD_OUT), &recipes::model(true)).unwrap()
}

fn tiny() -> Dataset {
    let root = recipes::repository("tests/data/robosuite_tiny_v21");
    Dataset::open(&recipes::data(&root, &[1]), &recipes::model(false)).unwrap()
}

fn shipped() -> LinearCodec {
    LinearCodec::load(&recipes::repository("experiments/demo/codec.safetensors")).unwrap()
}

#[test]
fn held_out_wrist_windows_reach_26_5_db_with_the_shipped_codec() {
    let (dataset, codec) = (demo(), shipped());
    assert!(dataset.validation().iter().all(|clip| HELD_OUT.contains(&clip.episode)));
    let views = held_out_quality(&codec, &dataset).unwrap();
    let wrist = &views[dataset.wrist_view()];
    assert_eq!(wrist.view, recipes::WRIST);
    assert!(wrist.psnr_db >= 26.5, "{} dB", wrist.psnr_db);
    assert!(views.iter().all(|view| (24.0..40.0).contains(&view.psnr_db)), "{views:?}");
}

#[test]
fn latents_of_held_out_clips_have_about_unit_power() {
    let (dataset, codec) = (demo(), shipped());
    let extent = Extent { frames: 9, height: 128, width: 128 };
    let mut squares = [0.0; CHANNELS];
    let mut count = 0.0;
    for clip in dataset.validation() {
        let video = dataset.load(clip).unwrap().video(dataset.wrist_view());
        let cells = extent.latent().unwrap().cells();
        for (sum, values) in squares.iter_mut().zip(codec.encode(&video, extent).unwrap().chunks_exact(cells)) {
            *sum += values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        }
        count += cells as f64;
    }
    for (channel, squares) in squares.iter().enumerate() {
        assert!((0.2..5.0).contains(&(squares / count)), "channel {channel} has power {}", squares / count);
    }
}

#[test]
fn a_clip_is_coded_view_by_view_in_the_models_order() {
    let (dataset, codec) = (demo(), shipped());
    let sample = dataset.load(&dataset.train()[3]).unwrap();
    let latents = encode_clip(&codec, &sample).unwrap();
    let extent = Extent { frames: 9, height: 128, width: 128 };
    let latent = extent.latent().unwrap();
    assert_eq!(latent, Extent { frames: 3, height: 8, width: 8 });
    assert_eq!(latents.len(), 48 * 3 * 3 * 64);
    for view in 0..3 {
        let one = codec.encode(&sample.video(view), extent).unwrap();
        for (channel, frame) in [(0, 0), (7, 1), (47, 2)] {
            let of_view = &one[(channel * 3 + frame) * 64..][..64];
            assert_eq!(&latents[((channel * 3 + frame) * 3 + view) * 64..][..64], of_view);
        }
        let decoded = decode_view(&codec, &latents, latent, 3, view).unwrap();
        assert_eq!(decoded, codec.decode(&one, latent).unwrap());
    }
}

#[test]
fn a_fit_is_the_same_bit_for_bit_whatever_the_threads_and_survives_saving() {
    let settings = FitSettings { clips: 6, wrist_patches: 500, wrist_emphasis: 5, iterations: 2 };
    let fit = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| LinearCodec::fit(&tiny(), settings, &|_, _| Ok(())).unwrap())
    };
    let (one, three) = (fit(1), fit(3));
    assert_eq!(one, three);

    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("new/a.safetensors"), folder.path().join("new/b.safetensors"));
    one.save(&a).unwrap();
    three.save(&b).unwrap();
    assert_eq!(std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
    assert_eq!(LinearCodec::load(&a).unwrap(), one);
    assert_eq!(std::fs::read_dir(a.parent().unwrap()).unwrap().count(), 2, "no temporary file stays");
    assert_ne!(shipped().hash(), one.hash());

    let summary = fit_and_save(&tiny(), settings, &b, &|_, _| Ok(())).unwrap();
    assert_eq!((summary.hash.as_str(), summary.measured_clips), (one.hash(), 3));
    assert_eq!(summary.bytes, std::fs::metadata(&a).unwrap().len());
    assert_eq!(summary.views, held_out_quality(&one, &tiny()).unwrap());
}

/// The tiny dataset's codec, as fast as a fit can be, and a file for it that is not there yet.
const QUICK: FitSettings = FitSettings { clips: 2, wrist_patches: 100, wrist_emphasis: 5, iterations: 1 };

fn linear(folder: &tempfile::TempDir) -> (PathBuf, CodecConfig) {
    let path = folder.path().join("new/codec.safetensors");
    (path.clone(), CodecConfig::Linear { path })
}

#[test]
fn a_codec_opens_only_with_the_training_clips_it_was_fitted_to() {
    let folder = tempfile::tempdir().unwrap();
    let (path, config) = linear(&folder);
    let codec = LinearCodec::fit(&tiny(), QUICK, &|_, _| Ok(())).unwrap();
    codec.save(&path).unwrap();
    assert_eq!(codec::open(&config, &tiny(), &|_, _| Ok(())).unwrap().hash(), codec.hash());

    let root = recipes::repository("tests/data/robosuite_tiny_v21");
    let open = |data| Dataset::open(&data, &recipes::model(false)).unwrap();
    let mut denser = recipes::data(&root, &[1]);
    denser.clip_stride = 8;
    // Episode 1 trains, and may be held out no longer; other windows; another dataset.
    for other in [open(recipes::data(&root, &[2])), open(recipes::data(&root, &[1, 2])), open(denser), demo()] {
        let error = codec::open(&config, &other, &|_, _| Ok(())).err().unwrap();
        assert_eq!((error.exit.code(), error.code), (78, "codec_of_other_clips"), "{error}");
        assert!(error.hint.contains("data fit-codec EXPERIMENT") && error.hint.contains("codec.path"), "{error}");
    }
    // The demo's file belongs to the demo.
    let path = recipes::repository("experiments/demo/codec.safetensors");
    codec::open(&CodecConfig::Linear { path }, &demo(), &|_, _| Ok(())).unwrap();
}

#[test]
fn a_process_waits_for_another_that_fits_the_same_file() {
    let folder = tempfile::tempdir().unwrap();
    let (path, config) = linear(&folder);
    std::fs::create_dir(path.parent().unwrap()).unwrap();
    let lock = std::fs::File::create(path.with_extension("safetensors.lock")).unwrap();
    lock.try_lock().unwrap();
    let (waits, waiting) = std::sync::mpsc::channel();
    let opened = std::thread::scope(|scope| {
        let open = scope.spawn(|| {
            let waits = Mutex::new(waits);
            codec::open(&config, &tiny(), &move |_, total| {
                if total == 0 {
                    let _ = waits.lock().unwrap().send(());
                }
                Ok(())
            })
            .map(|codec| codec.hash().to_owned())
        });
        waiting.recv().unwrap();
        let made = LinearCodec::fit(&tiny(), QUICK, &|_, _| Ok(())).unwrap();
        made.save(&path).unwrap();
        drop(lock);
        (open.join().unwrap().unwrap(), made.hash().to_owned())
    });
    assert_eq!(opened.0, opened.1, "the file of the other process was taken, not fitted again");
}

#[test]
fn an_error_of_progress_ends_every_long_work() {
    let folder = tempfile::tempdir().unwrap();
    let (path, config) = linear(&folder);
    let stop = |_: u64, _: u64| Err(Error::new(Exit::Stopped, "stopped", "SIGTERM"));
    let late = |done: u64, total: u64| if done + 1 < total { Ok(()) } else { stop(done, total) };
    let ends = |result: Result<(), Error>| assert_eq!(result.unwrap_err().code, "stopped");
    ends(tiny().training_key(&stop).map(drop));
    ends(tiny().identity(&stop).map(drop));
    ends(tiny().identity(&late).map(drop));
    ends(codec::open(&config, &tiny(), &stop).map(drop));
    let hashed = tiny();
    hashed.training_key(&|_, _| Ok(())).unwrap();
    ends(LinearCodec::fit(&hashed, QUICK, &stop).map(drop));
    ends(LinearCodec::fit(&hashed, QUICK, &late).map(drop));
    assert!(!path.exists());
    ends(fit_and_save(&hashed, QUICK, &path, &late).map(drop));
    assert!(path.exists(), "only the measuring was left");

    let lock = std::fs::File::create(path.with_extension("safetensors.lock")).unwrap();
    lock.try_lock().unwrap();
    ends(fit_and_save(&hashed, QUICK, &path, &stop).map(drop));
}

#[test]
fn a_broken_codec_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("codec.safetensors");
    assert_eq!(LinearCodec::load(&path).unwrap_err().code, "file_missing");
    let whole = std::fs::read(recipes::repository("experiments/demo/codec.safetensors")).unwrap();
    let nameless = {
        let header = 8..8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let text = String::from_utf8(whole[header.clone()].to_vec()).unwrap();
        assert!(text.contains("fitted_to"));
        [&whole[..8], text.replace("fitted_to", "fitted_by").as_bytes(), &whole[header.end..]].concat()
    };
    let mut infinite = whole.clone();
    let data = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    infinite[data..data + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    for bytes in [&b""[..], b"nonsense that is long enough", &whole[..whole.len() / 2], &infinite, &nameless] {
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(LinearCodec::load(&path).unwrap_err().code, "not_openable");
    }
}

#[test]
fn an_extent_that_does_not_fit_is_refused() {
    let codec = shipped();
    for (frames, height, width) in [(8, 16, 16), (9, 17, 16), (9, 16, 0), (0, 16, 16)] {
        let video = vec![0.0; 3 * frames * height * width];
        assert_eq!(codec.encode(&video, Extent { frames, height, width }).unwrap_err().code, "bad_extent");
    }
    let extent = Extent { frames: 9, height: 16, width: 16 };
    assert_eq!(codec.encode(&[0.0; 7], extent).unwrap_err().code, "bad_extent");
    assert_eq!(codec.decode(&[0.0; 7], extent.latent().unwrap()).unwrap_err().code, "bad_extent");
}

#[test]
fn cached_latents_equal_encoded_ones_and_a_torn_entry_is_made_again() {
    let (dataset, codec) = (tiny(), shipped());
    let folder = tempfile::tempdir().unwrap();
    let cache = LatentCache::open(folder.path()).unwrap();
    let clip = dataset.train()[0];
    let fresh = encode_clip(&codec, &dataset.load(&clip).unwrap()).unwrap();
    assert_eq!(cache.latents(&dataset, &codec, &clip).unwrap(), fresh);
    let entries =
        || -> Vec<_> { std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect() };
    assert_eq!(entries().len(), 1);
    assert_eq!(cache.latents(&dataset, &codec, &clip).unwrap(), fresh);

    std::fs::write(&entries()[0], b"torn").unwrap();
    assert_eq!(cache.latents(&dataset, &codec, &clip).unwrap(), fresh);
    assert!(std::fs::metadata(&entries()[0]).unwrap().len() > 1000, "the entry was written again");

    // Another window and another codec have entries of their own.
    cache.latents(&dataset, &codec, &dataset.train()[1]).unwrap();
    let other = FitSettings { clips: 2, wrist_patches: 100, wrist_emphasis: 5, iterations: 1 };
    cache.latents(&dataset, &LinearCodec::fit(&dataset, other, &|_, _| Ok(())).unwrap(), &clip).unwrap();
    assert_eq!(entries().len(), 3);
}
