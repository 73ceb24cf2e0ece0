//! Known effects in, known verdicts out.

use super::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

pub(super) fn clip(name: &str, wrist_lpips: f64) -> ClipMetrics {
    ClipMetrics {
        clip: name.into(),
        wrist_lpips,
        wrist_psnr: 20.0,
        wrist_ssim: 0.7,
        trans_l2_norm: 0.4,
        trans_l2_m: 0.05,
        rot_deg: 12.0,
        ceiling_lpips: 0.1,
        ceiling_psnr: 27.0,
        wrist_latent_mse: None,
    }
}

fn rule() -> DecisionRule {
    DecisionRule {
        baseline: "m1_baseline".into(),
        candidate: "m2_geometry".into(),
        metric: DECISION_METRIC.into(),
        confidence: 0.95,
        resamples: 1000,
    }
}

fn plan() -> Plan {
    Plan::new(500, 100, true)
}

/// Clips differ a lot from each other (0.3 .. 0.7), fall with the steps, and share step 0 bit for bit. The candidate is
/// `effect` better after step 0, with noise of `noise` on each clip and point.
fn arms(effect: f64, noise: f64, seed: u64) -> (ArmPoints, ArmPoints) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut unit = move || f64::from(random.next_u32()) / 4_294_967_296.0 - 0.5;
    let mut arms = (
        ArmPoints { arm: "m1_baseline".into(), ..ArmPoints::default() },
        ArmPoints { arm: "m2_geometry".into(), ..ArmPoints::default() },
    );
    for step in plan().steps {
        let (mut baseline, mut candidate) = (Vec::new(), Vec::new());
        for index in 0..16 {
            let name = format!("episode_{index:06}@0");
            let level = 0.3 + 0.025 * f64::from(index) - step as f64 * 2e-4;
            baseline.push(clip(&name, level));
            let change = if step == 0 { 0.0 } else { noise * unit() - effect };
            candidate.push(clip(&name, level + change));
        }
        arms.0.points.insert(step, Point::new(baseline));
        arms.1.points.insert(step, Point::new(candidate));
    }
    arms
}

fn verdict(arms: &(ArmPoints, ArmPoints)) -> Verdict {
    judge(&rule(), &plan(), &arms.0, &arms.1).expect("judged")
}

#[test]
fn a_known_effect_is_found_in_its_direction() {
    let better = verdict(&arms(0.01, 0.02, 1));
    assert_eq!(better.decision, Decision::Better);
    assert_eq!(better.step_zero, StepZero::Equal { clips: 16 });
    let difference = better.difference.expect("difference");
    assert!((difference.mean + 0.01).abs() < 0.003, "{difference:?}");
    assert!(difference.interval.expect("interval").high < 0.0, "{difference:?}");
    assert_eq!(difference.per_clip.len(), 16);
    assert_eq!(verdict(&arms(-0.01, 0.02, 1)).decision, Decision::Worse);
}

#[test]
fn noise_is_undecided_about_as_often_as_promised() {
    let experiments = 200;
    let decided = (0..experiments).filter(|&seed| verdict(&arms(0.0, 0.02, seed)).decision != Decision::Undecided);
    let share = decided.count() as f64 / experiments as f64;
    assert!((0.005..=0.10).contains(&share), "{share} of pure noise was decided; 0.05 is promised");
}

#[test]
fn pairing_sees_what_the_means_hide() {
    // The clips' own spread (0.12) is 20 times the effect: unpaired means could not tell.
    assert_eq!(verdict(&arms(0.006, 0.01, 3)).decision, Decision::Better);
}

#[test]
fn step_zero_does_not_enter_the_difference() {
    let mut moved = arms(0.01, 0.0, 1);
    let before = verdict(&moved).difference.expect("difference").mean;
    for arm in [&mut moved.0, &mut moved.1] {
        arm.points.get_mut(&0).expect("point").clips.values_mut().for_each(|clip| clip.wrist_lpips = 9.0);
    }
    assert_eq!(verdict(&moved).difference.expect("difference").mean, before);
}

#[test]
fn the_trajectory_decides_and_not_its_last_point() {
    let mut arms = arms(0.02, 0.001, 1);
    let baseline = arms.0.points[&500].clone();
    for (name, clip) in &mut arms.1.points.get_mut(&500).expect("point").clips {
        clip.wrist_lpips = baseline.clips[name].wrist_lpips + 0.01;
    }
    assert_eq!(verdict(&arms).decision, Decision::Better);
}

#[test]
fn the_same_input_gives_the_same_verdict() {
    assert_eq!(verdict(&arms(0.001, 0.02, 5)), verdict(&arms(0.001, 0.02, 5)));
}

#[test]
fn nothing_is_decided_before_the_last_point() {
    let mut partial = arms(0.05, 0.0, 1);
    partial.1.points.remove(&500);
    let found = verdict(&partial);
    assert_eq!((found.decision, found.points_done, found.points_planned), (Decision::Pending, 4, 5));
    assert!(
        found
            .headline()
            .starts_with("m2_geometry pending (4 of 5 points, one run each): wrist LPIPS difference so far -0.05")
    );
    let last = found.trajectory.last().expect("row");
    assert!(last.step == 500 && last.baseline.is_some() && last.candidate.is_none());

    let none = judge(&rule(), &plan(), &ArmPoints::default(), &ArmPoints::default()).expect("judged");
    assert_eq!((none.decision, none.step_zero, none.clips), (Decision::Pending, StepZero::Missing, 0));
}

#[test]
fn one_bit_at_step_zero_is_seen_in_any_field() {
    type Field = fn(&mut ClipMetrics) -> &mut f64;
    let all: [(&str, Field); 8] = [
        ("wrist_lpips", |clip| &mut clip.wrist_lpips),
        ("wrist_psnr", |clip| &mut clip.wrist_psnr),
        ("wrist_ssim", |clip| &mut clip.wrist_ssim),
        ("trans_l2_norm", |clip| &mut clip.trans_l2_norm),
        ("trans_l2_m", |clip| &mut clip.trans_l2_m),
        ("rot_deg", |clip| &mut clip.rot_deg),
        ("ceiling_lpips", |clip| &mut clip.ceiling_lpips),
        ("ceiling_psnr", |clip| &mut clip.ceiling_psnr),
    ];
    for (name, field) in all {
        let mut moved = arms(0.01, 0.0, 1);
        let clips = &mut moved.1.points.get_mut(&0).expect("point").clips;
        let value = field(clips.get_mut("episode_000007@0").expect("clip"));
        let before = *value;
        *value = f64::from_bits(value.to_bits() + 1);
        let after = *value;
        let found = verdict(&moved);
        let expected =
            StepZero::Differs { clip: "episode_000007@0".into(), field: name, baseline: before, candidate: after };
        assert_eq!(found.step_zero, expected);
        assert_eq!(found.decision, Decision::Undecided, "an unequal start leaves nothing to decide");
        assert!(found.render_text(80).contains("THE ARMS DIFFER"));
        // Arms whose ablated fields change the start may differ there.
        let free = Plan { equal_start: false, ..plan() };
        assert_eq!(judge(&rule(), &free, &moved.0, &moved.1).expect("judged").decision, Decision::Better);
    }
}

#[test]
fn different_clip_lists_are_refused_by_name() {
    let (baseline, mut candidate) = arms(0.01, 0.0, 1);
    let point = candidate.points.get_mut(&300).expect("point");
    point.clips.remove("episode_000003@0");
    let error = judge(&rule(), &plan(), &baseline, &candidate).expect_err("refused");
    assert_eq!((error.code, error.exit.code()), ("clip_lists_differ", 78));
    let line = error.to_string();
    assert!(line.contains("m2_geometry step 300 lacks episode_000003@0 (15 clips against 16"), "{line}");

    let point = candidate.points.get_mut(&300).expect("point");
    point.clips.insert("episode_000099@0".into(), clip("episode_000099@0", 0.1));
    point.bad_lines = 1;
    let line = judge(&rule(), &plan(), &baseline, &candidate).expect_err("refused").to_string();
    assert!(
        line.contains("lacks episode_000003@0 and has episode_000099@0") && line.contains("1 unreadable"),
        "{line}"
    );
}

#[test]
fn few_episodes_never_decide_however_many_clips_they_give() {
    for (episodes, words) in [(5, "5 held-out episodes are too few"), (2, "2 held-out"), (1, "1 held-out episode is")] {
        let mut few = arms(0.05, 0.001, 1);
        for point in few.0.points.values_mut().chain(few.1.points.values_mut()) {
            let renamed = point.clips.values().enumerate().map(|(index, metrics)| ClipMetrics {
                clip: format!("episode_{:06}@{index}", index % episodes),
                ..metrics.clone()
            });
            *point = Point::new(renamed.collect::<Vec<_>>());
        }
        let found = verdict(&few);
        assert_eq!((found.decision, found.clips, found.episodes), (Decision::Undecided, 16, episodes));
        assert!(found.notes.iter().any(|note| note.contains(words)), "{:?}", found.notes);
        assert!(!found.render_text(80).contains("inf"), "{}", found.render_text(80));
        assert_eq!(found.headline().contains("without an interval"), episodes < 4, "{}", found.headline());
    }
}

#[test]
fn clips_of_one_episode_count_as_one_witness() {
    // Four episodes gain, two lose a little; more clips of each say the same and prove nothing more.
    let mut alike = arms(0.0, 0.0, 1);
    for (&step, point) in &mut alike.1.points {
        let baseline = &alike.0.points[&step];
        for (name, metrics) in &mut point.clips {
            let episode = name["episode_".len()..][..6].parse::<usize>().expect("number") % 6;
            let change = [-0.05, -0.05, -0.05, -0.05, 0.02, 0.02][episode];
            metrics.wrist_lpips = baseline.clips[name].wrist_lpips + if step == 0 { 0.0 } else { change };
        }
    }
    let independent = verdict(&alike);
    for point in alike.0.points.values_mut().chain(alike.1.points.values_mut()) {
        let renamed = point.clips.values().enumerate().map(|(index, metrics)| ClipMetrics {
            clip: format!("episode_{:06}@{index}", index % 6),
            ..metrics.clone()
        });
        *point = Point::new(renamed.collect::<Vec<_>>());
    }
    let clustered = verdict(&alike);
    assert_eq!((independent.decision, clustered.decision), (Decision::Better, Decision::Undecided));
}

#[test]
fn secondary_metrics_are_named_when_they_reverse_and_never_decide() {
    let mut reversed = arms(0.01, 0.001, 1);
    for (&step, point) in &mut reversed.1.points {
        if step > 0 {
            point.clips.values_mut().for_each(|clip| {
                clip.wrist_psnr -= 0.25;
                clip.wrist_ssim -= 0.05;
            });
        }
    }
    let found = verdict(&reversed);
    assert_eq!(found.decision, Decision::Better);
    assert_eq!(found.notes.len(), 3, "{:?}", found.notes);
    assert!(found.notes[0].contains("PSNR") && found.notes[0].contains("too little"), "{:?}", found.notes);
    assert!(found.notes[1].contains("SSIM"), "{:?}", found.notes);
    assert_eq!(verdict(&arms(0.01, 0.001, 1)).notes, [SCOPE]);
    // Without a decision there is no ranking that others could reverse.
    reversed.1.points.remove(&500);
    assert_eq!(verdict(&reversed).notes, [SCOPE]);
}

#[test]
fn rules_that_cannot_decide_are_refused() {
    let (baseline, candidate) = arms(0.01, 0.0, 1);
    let bad: [fn(&mut DecisionRule); 5] = [
        |rule| rule.metric = "wrist_psnr".into(),
        |rule| rule.confidence = 1.0,
        |rule| rule.confidence = f64::NAN,
        |rule| rule.resamples = 199,
        |rule| rule.candidate = rule.baseline.clone(),
    ];
    for change in bad {
        let mut rule = rule();
        change(&mut rule);
        assert_eq!(judge(&rule, &plan(), &baseline, &candidate).expect_err("refused").code, "decision_rule");
    }
}

#[test]
fn a_plan_has_the_first_and_the_last_step() {
    assert_eq!(Plan::new(250, 100, true).steps, [0, 100, 200, 250]);
    assert_eq!(Plan::new(200, 100, true).steps, [0, 100, 200]);
    assert_eq!(Plan::new(0, 100, true).steps, [0]);
    assert_eq!(Plan::new(2, 0, true).steps, [0, 1, 2]);
}

#[test]
fn text_fits_the_terminal() {
    let found = verdict(&arms(0.01, 0.02, 1));
    for width in [40, 60, 80, 120, 200] {
        let text = found.render_text(width);
        let longest = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
        assert!(longest <= width, "{longest} > {width}:\n{text}");
        assert!(text.contains("LPIPS"));
    }
    insta::assert_snapshot!(found.render_text(100));
}

#[test]
fn json_carries_the_grounds() {
    let json = serde_json::to_value(verdict(&arms(0.01, 0.02, 1))).expect("json");
    assert_eq!(json["decision"], "better");
    assert_eq!(json["step_zero"]["state"], "equal");
    assert_eq!(json["difference"]["per_clip"].as_array().map(Vec::len), Some(16));
    assert_eq!(json["trajectory"].as_array().map(Vec::len), Some(6));
}

#[test]
fn clips_and_chunks_belong_to_their_episode() {
    for (clip, episode) in [
        ("episode_000012@32", "episode_000012"),
        ("episode_000012#3", "episode_000012"),
        ("episode_000012_0_110#3", "episode_000012"),
        ("dataset_0003_episode_000012_110_207#1", "dataset_0003_episode_000012"),
        ("a@7", "a"),
        ("another name", "another name"),
    ] {
        assert_eq!(episode_of(clip), episode, "{clip}");
    }
}

#[test]
fn a_metric_that_a_family_lacks_is_shown_as_none() {
    let (mut baseline, mut candidate) = arms(0.05, 0.002, 3);
    for metrics in [&mut baseline, &mut candidate].into_iter().flat_map(|arm| arm.points.values_mut()) {
        for clip in metrics.clips.values_mut() {
            (clip.trans_l2_m, clip.rot_deg, clip.ceiling_psnr) = (f64::NAN, f64::NAN, f64::NAN);
        }
    }
    let found = judge(&rule(), &plan(), &baseline, &candidate).expect("judged");
    assert_eq!(found.decision, Decision::Better);
    let text = found.render_text(120);
    assert!(!text.contains("NaN") && !text.contains("ceiling") && text.contains(" - "), "{text}");
}
