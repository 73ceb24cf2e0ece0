//! Reads the pictures of a validation point off the screen's thread: `validation/step-NNNNNNNN/strips/*.png`, each with
//! the truth above the prediction.

use super::app::{Msg, StripRequest};
use super::snapshot::{PictureRow, PictureStrip};
use crate::runlog::RunDir;
use crossbeam_channel::{Receiver, Sender};
use image::RgbImage;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// No terminal has more columns than this to show; larger pictures are reduced once, not at every frame.
const WIDEST: u32 = 512;
/// Larger files are no strips of ours.
const LARGEST_FILE: u64 = 64 << 20;

/// Answers requests until the screen is gone; of several waiting ones only the newest.
pub fn run(requests: &Receiver<StripRequest>, messages: &Sender<Msg>) {
    while let Ok(mut request) = requests.recv() {
        while let Ok(newer) = requests.try_recv() {
            request = newer;
        }
        let strip = load(&request);
        if messages.send(Msg::Strip(request, strip)).is_err() {
            return;
        }
    }
}

/// The pictures of one clip, one row an arm; `Err` says in a sentence why there are none.
pub fn load(request: &StripRequest) -> Result<PictureStrip, String> {
    let folders: Vec<_> =
        request.arms.iter().map(|(arm, directory)| (arm, RunDir::new(directory).strips(request.step))).collect();
    // Clips that any arm has, by name: every arm measures the same ones, but one may still be writing.
    let clips: BTreeSet<String> = folders.iter().flat_map(|(_, folder)| clip_names(folder)).collect();
    let count = clips.len();
    let index = request.clip.min(count.saturating_sub(1));
    let Some(clip) = clips.into_iter().nth(index) else {
        return Err(format!("step {} kept no pictures", request.step));
    };
    let mut truth = None;
    let mut rows = Vec::new();
    for (arm, folder) in folders {
        let picture = read(&folder.join(format!("{clip}.png"))).map(|picture| {
            let (above, below) = halves(&picture);
            truth.get_or_insert(above);
            below
        });
        rows.push(PictureRow { arm: Some(arm.clone()), picture });
    }
    if let Some(truth) = truth {
        rows.insert(0, PictureRow { arm: None, picture: Ok(truth) });
    }
    Ok(PictureStrip { step: request.step, clip, index, count, rows })
}

fn clip_names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "png"))
        .filter_map(|path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned()))
        .collect()
}

fn read(path: &Path) -> Result<RgbImage, String> {
    let size = std::fs::metadata(path).map_err(|_| "not written by this arm".to_owned())?.len();
    if size > LARGEST_FILE {
        return Err(format!("{} is too large for a strip", path.display()));
    }
    let picture = image::open(path).map_err(|error| format!("unreadable picture: {error}"))?;
    let picture = if picture.width() > WIDEST { picture.thumbnail(WIDEST, u32::MAX) } else { picture };
    Ok(picture.to_rgb8())
}

/// Upper and lower half; a picture of one row is both.
fn halves(picture: &RgbImage) -> (Arc<RgbImage>, Arc<RgbImage>) {
    let (width, height) = picture.dimensions();
    let half = (height / 2).max(1);
    let part = |top: u32| Arc::new(image::imageops::crop_imm(picture, 0, top, width, half).to_image());
    (part(0), part(height.saturating_sub(half)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::Rgb;

    fn request(root: &Path, arms: &[&str], clip: usize) -> StripRequest {
        StripRequest { step: 50, clip, arms: arms.iter().map(|arm| ((*arm).to_owned(), root.join(arm))).collect() }
    }

    fn write(root: &Path, arm: &str, clip: &str, color: u8) {
        let folder = RunDir::new(root.join(arm)).strips(50);
        std::fs::create_dir_all(&folder).unwrap();
        let picture = RgbImage::from_fn(40, 20, |_, y| if y < 10 { Rgb([9, 9, 9]) } else { Rgb([color; 3]) });
        picture.save(folder.join(format!("{clip}.png"))).unwrap();
    }

    #[test]
    fn truth_comes_first_and_each_arm_has_a_row() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "m1", "a@0", 100);
        write(folder.path(), "m1", "b@16", 110);
        write(folder.path(), "m2", "b@16", 200);
        let strip = load(&request(folder.path(), &["m1", "m2"], 1)).unwrap();
        assert_eq!((strip.clip.as_str(), strip.index, strip.count), ("b@16", 1, 2));
        let pixel = |row: usize| strip.rows[row].picture.as_ref().unwrap().get_pixel(3, 3).0[0];
        assert_eq!((pixel(0), pixel(1), pixel(2)), (9, 110, 200));
        let strip = load(&request(folder.path(), &["m1", "m2"], 0)).unwrap();
        assert!(strip.rows[2].picture.is_err(), "m2 has no clip a@0");
    }

    #[test]
    fn broken_and_absent_pictures_are_said_not_crashed_on() {
        let folder = tempfile::tempdir().unwrap();
        assert!(load(&request(folder.path(), &["m1"], 0)).unwrap_err().contains("no pictures"));
        write(folder.path(), "m1", "a@0", 100);
        let path = RunDir::new(folder.path().join("m1")).strips(50).join("a@0.png");
        std::fs::write(&path, b"no png").unwrap();
        let strip = load(&request(folder.path(), &["m1"], 7)).unwrap();
        assert!(strip.rows[0].picture.as_ref().unwrap_err().contains("unreadable"));
        RgbImage::new(1, 1).save(&path).unwrap();
        assert!(load(&request(folder.path(), &["m1"], 0)).unwrap().rows[0].picture.is_ok());
    }
}
