//! What both families ask of a dataset's views: the size that is stated, the video that must fit it, and its pictures
//! as numbers.

use super::lerobot::Metadata;
use super::validate::MeanColour;
use super::video::{FrameFault, VideoFile};
use crate::codec::Extent;
use crate::{Error, Result};

/// (height, width) in pixels of a video by the dataset's own word.
///
/// # Errors
/// `missing_view`, naming those that exist; `broken_metadata` if the size is not stated.
pub(super) fn stated_size(metadata: &Metadata, view: &str) -> Result<(usize, usize)> {
    let path = metadata.root.join("meta/info.json");
    let feature = metadata.features.get(view).filter(|feature| feature.dtype == "video");
    let Some(feature) = feature else {
        let videos: Vec<&str> =
            metadata.features.iter().filter(|(_, it)| it.dtype == "video").map(|(key, _)| key.as_str()).collect();
        return Err(Error::refused("missing_view", format!("the dataset has no video {view}"))
            .at(&path)
            .hint(format!("data.views may name {}", videos.join(", "))));
    };
    feature
        .size
        .ok_or_else(|| Error::data("broken_metadata", format!("the size of video {view} is not stated")).at(&path))
}

/// Opens one video and compares its size (height, width), length and times with what the dataset says.
///
/// # Errors
/// Those of [`VideoFile::open`]; `wrong_size`, `too_short`, `too_long`, `wrong_fps`.
pub(super) fn open(metadata: &Metadata, view: &str, episode: usize, size: (usize, usize)) -> Result<VideoFile> {
    let path = metadata.video_file(view, episode)?;
    let video = VideoFile::open(&path)?;
    if video.size() != size {
        let ((got_height, got_width), (height, width)) = (video.size(), size);
        let what = format!("video is {got_width}x{got_height}, the dataset says {width}x{height}");
        return Err(Error::data("wrong_size", what).at(&path).hint("all videos of a view must have one size"));
    }
    let length = metadata.episode(episode).map_or(0, |record| record.length);
    let frames = video.frame_count();
    if frames != length {
        let code = if frames < length { "too_short" } else { "too_long" };
        let what = format!("video has {frames} frames, the episode {length}");
        return Err(Error::data(code, what).at(&path).hint("is it another episode's, or cut off?"));
    }
    if let Some((frame, seconds)) = video.frame_out_of_time(metadata.fps) {
        let (fps, expected) = (metadata.fps, frame as f64 / metadata.fps);
        let what = format!("frame {frame} is shown at {seconds:.3} s, at {fps} fps it is {expected:.3} s");
        return Err(Error::data("wrong_fps", what).at(&path).hint("encode it again at the rate of its dataset"));
    }
    Ok(video)
}

/// Opens and decodes one view for all samples that nothing was found against yet, and notes what is wrong with it;
/// `frames` are those of the sample at a place in `verdicts`.
pub(super) fn check(
    verdicts: &mut [Result<(), FrameFault>],
    frames: impl Fn(usize) -> Vec<usize>,
    open: impl FnOnce() -> Result<VideoFile>,
    colour: &mut MeanColour,
) {
    let sound: Vec<usize> = (0..verdicts.len()).filter(|at| verdicts[*at].is_ok()).collect();
    if sound.is_empty() {
        return;
    }
    match open() {
        Err(error) => sound.iter().for_each(|at| verdicts[*at] = Err(error.clone().into())),
        Ok(mut video) => {
            let windows: Vec<Vec<usize>> = sound.iter().map(|at| frames(*at)).collect();
            for (at, verdict) in sound.iter().zip(video.check_windows(&windows, &mut |picture| colour.add(&picture))) {
                verdicts[*at] = verdict;
            }
        }
    }
}

/// Some frames of one view.
#[derive(Clone, PartialEq)]
pub struct ViewFrames {
    /// In pixels.
    pub extent: Extent,
    /// RGB, [T, 3, height, width].
    pub rgb: Vec<u8>,
}

impl ViewFrames {
    /// As a codec takes them: [3, T, height, width], `x / 127.5 - 1`.
    pub fn video(&self) -> Vec<f32> {
        to_video(&self.rgb, self.extent.height * self.extent.width)
    }
}

/// RGB frames [T, 3, plane] -> [3, T, plane], `x / 127.5 - 1`: the pictures of one view as a codec takes them.
pub(super) fn to_video(frames: &[u8], plane: usize) -> Vec<f32> {
    let count = frames.len() / (3 * plane).max(1);
    let mut video = Vec::with_capacity(frames.len());
    for channel in 0..3 {
        for frame in 0..count {
            let from = (frame * 3 + channel) * plane;
            video.extend(frames[from..from + plane].iter().map(|value| f32::from(*value) / 127.5 - 1.0));
        }
    }
    video
}

/// The recipe may hold out only episodes that exist (in one of the datasets).
///
/// # Errors
/// `unknown_episode`.
pub(super) fn check_held_out(datasets: &[Metadata], held_out: &[usize]) -> Result<()> {
    let Some(unknown) = held_out.iter().find(|episode| datasets.iter().all(|set| set.episode(**episode).is_none()))
    else {
        return Ok(());
    };
    let indices = || datasets.iter().flat_map(|set| &set.episodes).map(|record| record.episode_index);
    let hint = match (indices().min(), indices().max()) {
        (Some(first), Some(last)) => format!("the dataset has episodes {first} to {last}"),
        _ => String::new(),
    };
    Err(Error::refused("unknown_episode", format!("episode {unknown} does not exist"))
        .in_place("data.validation_episodes")
        .hint(hint))
}
