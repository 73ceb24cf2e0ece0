//! The linear codec on the demo's data: how well it codes, and that a fit is reproducible.

mod recipes;

use lbva_tui::codec::{CHANNELS, Extent, FitSettings, LatentCache, LatentCodec, LinearCodec, decode_view, encode_clip};
use lbva_tui::data::{ClipSample, Dataset};

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

/// dB against the source frames 1.., averaged over frames; the decoded video is rounded to 8 bits.
fn psnr(sample: &ClipSample, view: usize, video: &[f32]) -> f64 {
    let (frames, plane) = (sample.frame_count(), sample.height * sample.width);
    let mut sum = 0.0;
    for frame in 1..frames {
        let mut squares = 0.0;
        for channel in 0..3 {
            let decoded = &video[(channel * frames + frame) * plane..][..plane];
            let source = &sample.frames[view][(frame * 3 + channel) * plane..][..plane];
            for (decoded, source) in decoded.iter().zip(source) {
                let level = ((decoded.clamp(-1.0, 1.0) + 1.0) * 127.5).round();
                squares += f64::from(level - f32::from(*source)).powi(2);
            }
        }
        sum += 10.0 * (255.0_f64.powi(2) * (3 * plane) as f64 / squares).log10();
    }
    sum / (frames - 1) as f64
}

#[test]
fn held_out_wrist_windows_reach_26_5_db_with_the_shipped_codec() {
    let (dataset, codec) = (demo(), shipped());
    let (height, width) = dataset.picture_size();
    let extent = Extent { frames: 9, height, width };
    let wrist = dataset.wrist_view();
    let clips = dataset.validation();
    assert!(clips.len() > 40 && clips.iter().all(|clip| HELD_OUT.contains(&clip.episode)));
    let mut sum = 0.0;
    let mut squares = [0.0; CHANNELS];
    let mut count = 0;
    for clip in clips {
        let sample = dataset.load(clip).unwrap();
        let latents = codec.encode(&sample.video(wrist), extent).unwrap();
        let cells = extent.latent().unwrap().cells();
        for (channel, values) in latents.chunks_exact(cells).enumerate() {
            squares[channel] += values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        }
        count += cells;
        let video = codec.decode(&latents, extent.latent().unwrap()).unwrap();
        sum += psnr(&sample, wrist, &video);
    }
    let mean = sum / clips.len() as f64;
    println!("wrist, frames 1..8: {mean:.3} dB over {} clips", clips.len());
    assert!(mean >= 26.5, "{mean} dB");
    // Normalised latents: held-out data have about unit power in each channel.
    for (channel, squares) in squares.iter().enumerate() {
        let power = squares / f64::from(count as u32);
        assert!((0.2..5.0).contains(&power), "channel {channel} has power {power}");
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
        assert!(psnr(&sample, view, &decoded) > 20.0);
    }
}

#[test]
fn a_fit_is_the_same_bit_for_bit_whatever_the_threads_and_survives_saving() {
    let settings = FitSettings { clips: 6, wrist_patches: 500, wrist_emphasis: 5, iterations: 2 };
    let fit = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| LinearCodec::fit(&tiny(), settings, &|_, _| {}).unwrap())
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
}

#[test]
fn a_broken_codec_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("codec.safetensors");
    assert_eq!(LinearCodec::load(&path).unwrap_err().code, "file_missing");
    let whole = std::fs::read(recipes::repository("experiments/demo/codec.safetensors")).unwrap();
    let mut infinite = whole.clone();
    let data = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    infinite[data..data + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    for bytes in [&b""[..], b"nonsense that is long enough", &whole[..whole.len() / 2], &infinite] {
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
    cache.latents(&dataset, &LinearCodec::fit(&dataset, other, &|_, _| {}).unwrap(), &clip).unwrap();
    assert_eq!(entries().len(), 3);
}
