//! Whether two runs may be compared: by their own records the same but for what is ablated, and after the same work.
//!
//! What the configuration says is checked before a run begins; this looks at what the runs say they were, which nobody can
//! have changed since without a trace.

use super::ArmPoints;
use crate::Result;
use crate::config::covers;
use crate::files::io_error;
use crate::runlog::{ChangeView, RunDir, RunView, Work, differences, is_location};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::ErrorKind;

/// What a run is bound to: `arm.yaml` and `identity.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub arm: Value,
    pub identity: Value,
}

impl Record {
    /// `None` before a run has both; what is damaged is refused by the next attempt, and says nothing here.
    pub fn read(run: &RunDir) -> Result<Option<Self>> {
        let text = |path: std::path::PathBuf| match std::fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            read => read.map(Some).map_err(|error| io_error("cannot read the run's record", &path, &error)),
        };
        let (Some(arm), Some(identity)) = (text(run.arm_yaml())?, text(run.identity())?) else { return Ok(None) };
        let (arm, identity) = (serde_yaml::from_slice(&arm), serde_json::from_slice(&identity));
        Ok(arm.ok().zip(identity.ok()).map(|(arm, identity)| Self { arm, identity }))
    }
}

/// Fields of the identity that follow from these of the configuration: an ablated one may change them.
const FOLLOWS: [(&str, &[&str]); 9] = [
    ("data", &["data"]),
    ("training_clips", &["data"]),
    ("training_episodes", &["data"]),
    ("validation_clips", &[]),
    ("validation_chunks", &[]),
    ("codec", &["codec"]),
    ("text", &["text"]),
    ("initial_shared_weights", &["train.seed", "weights", "model"]),
    ("weights", &["weights"]),
];

/// Whatever sets the runs apart beside the ablated fields, and ablated fields in which they do not differ, a sentence each.
pub fn confounders(ablated: &[String], baseline: &Record, candidate: &Record) -> Vec<String> {
    let show = |value: &Option<Value>| value.as_ref().map_or_else(|| "absent".to_owned(), Value::to_string);
    let arms = differences(&baseline.arm, &candidate.arm);
    let declared = |field: &str| ablated.iter().any(|ablated| covers(ablated, field));
    let mut found = Vec::new();
    for difference in arms.iter().filter(|difference| !declared(&difference.field) && !is_location(&difference.field)) {
        let (field, left, right) = (&difference.field, show(&difference.recorded), show(&difference.now));
        found.push(format!("the runs differ in {field} ({left} against {right}), which is not ablated"));
    }
    for field in ablated.iter().filter(|ablated| !arms.iter().any(|difference| covers(ablated, &difference.field))) {
        found.push(format!("the runs do not differ in the ablated field {field}"));
    }
    for difference in differences(&baseline.identity, &candidate.identity) {
        let top = difference.field.split(['.', '[']).next().unwrap_or_default();
        // The branch's own weights are left out of the hash, so that an ablated branch explains no other weights.
        let touches = |of: &&str| {
            ablated.iter().any(|it| !it.starts_with("model.geometry") && (covers(of, it) || covers(it, of)))
        };
        let follows = FOLLOWS.iter().find(|(field, _)| *field == top).is_some_and(|(_, of)| of.iter().any(touches));
        if top != "arm" && !follows {
            let (field, left, right) = (&difference.field, show(&difference.recorded), show(&difference.now));
            found.push(format!("the runs were bound to different {field} ({left} against {right})"));
        }
    }
    found
}

/// What the steps of one arm add up to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ArmWork {
    pub arm: String,
    /// At the latest step that counted; `None` for a run that did not count.
    pub total: Option<Work>,
    /// By validation point.
    #[serde(skip)]
    pub at: BTreeMap<u64, Work>,
}

impl ArmWork {
    pub fn of(view: &RunView) -> Self {
        let at = view.validations.iter().filter_map(|point| Some((point.event.step, point.event.work?))).collect();
        Self { arm: view.arm.clone(), total: view.last_step.as_ref().and_then(|step| step.work), at }
    }

    /// `m1: 1,950 steps at full learning rate, 3,900 samples; 2.5 % of all steps were warm-up`.
    pub(super) fn line(&self) -> Option<String> {
        use crate::words::thousands;
        let work = self.total?;
        let (steps, samples) = (thousands(work.full_lr_steps), thousands(work.full_lr_samples));
        let warmup = 100.0 * work.warmup_share()?;
        let arm = &self.arm;
        Some(format!(
            "{arm}: {steps} steps at full learning rate, {samples} samples; {warmup:.1} % of all steps were warm-up"
        ))
    }
}

/// The first point at which the arms had not seen the same number of samples at full learning rate, in words.
pub fn unequal_work(baseline: &ArmWork, candidate: &ArmWork) -> Option<String> {
    let (step, left, right) = baseline.at.iter().find_map(|(step, left)| {
        let right = candidate.at.get(step)?;
        (left.full_lr_samples != right.full_lr_samples).then_some((step, left.full_lr_samples, right.full_lr_samples))
    })?;
    Some(format!(
        "the arms are compared after unequal work: at step {step} {} had seen {left} samples at full learning rate, {} {right}; \
         report --equal-work compares points at equal ones",
        baseline.arm, candidate.arm
    ))
}

/// The candidate's points under the steps of the baseline's that follow the same number of samples at full learning rate, and
/// the pairs (baseline, candidate). Step 0 goes with step 0; points within warm-up, which follow none, have no partner.
pub fn at_equal_work(baseline: &ArmWork, candidate: &ArmWork, points: &ArmPoints) -> (ArmPoints, Vec<(u64, u64)>) {
    let partner = |(&step, work): (&u64, &Work)| match (step, work.full_lr_samples) {
        (0, _) => Some((0, 0)),
        (_, 0) => None,
        (_, samples) => {
            candidate.at.iter().find(|(_, work)| work.full_lr_samples == samples).map(|(&other, _)| (step, other))
        }
    };
    let pairs: Vec<(u64, u64)> = baseline.at.iter().filter_map(partner).collect();
    let moved = pairs.iter().filter_map(|(step, other)| Some((*step, points.points.get(other)?.clone()))).collect();
    (ArmPoints { arm: points.arm.clone(), points: moved }, pairs)
}

/// The changes that were accepted in the middle of a run, a sentence each.
pub fn seams(view: &RunView) -> Vec<String> {
    let words = |ChangeView { step, field, values, .. }: &ChangeView| {
        format!("{} went on with a change accepted at step {step}: {field} {values}", view.arm)
    };
    view.changes.iter().map(words).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Point;
    use super::super::tests::clip;
    use super::*;
    use serde_json::json;

    fn record(change: impl FnOnce(&mut Record)) -> Record {
        let mut record = Record {
            arm: json!({"model": {"geometry": {"enabled": false}}, "data": {"dataset": "/a", "views": ["x", "y"]}, "train": {"lr": 1.0, "seed": 1}}),
            identity: json!({"arm": "m1", "data": "d", "training_clips": "t", "validation_clips": "v", "code": "c", "initial_shared_weights": "w"}),
        };
        change(&mut record);
        record
    }

    fn found(ablated: &[&str], change: impl FnOnce(&mut Record)) -> Vec<String> {
        let ablated: Vec<String> = ablated.iter().map(|&field| field.to_owned()).collect();
        confounders(&ablated, &record(|_| ()), &record(change))
    }

    #[test]
    fn only_what_is_ablated_may_differ_and_it_must() {
        let geometry = |record: &mut Record| {
            record.arm["model"]["geometry"]["enabled"] = true.into();
            record.identity["arm"] = "m2".into();
            record.arm["data"]["dataset"] = "/elsewhere".into();
        };
        assert_eq!(found(&["model.geometry.enabled"], geometry), [""; 0]);
        assert_eq!(found(&["model.geometry"], geometry), [""; 0]);
        assert_eq!(
            found(&["model.geometry.enabled"], |_| ()),
            ["the runs do not differ in the ablated field model.geometry.enabled"]
        );
        let two = found(&["model.geometry"], |record| {
            geometry(record);
            record.arm["train"]["lr"] = 2.0.into();
            record.arm["data"]["views"][1] = "z".into();
        });
        assert_eq!(
            two,
            [
                "the runs differ in data.views[1] (\"y\" against \"z\"), which is not ablated",
                "the runs differ in train.lr (1.0 against 2.0), which is not ablated"
            ]
        );
        for field in ["data", "training_clips", "validation_clips", "code", "initial_shared_weights"] {
            let one = found(&["model.geometry"], |record| {
                geometry(record);
                record.identity[field] = "other".into();
            });
            assert!(one.len() == 1 && one[0].contains(&format!("different {field} (")), "{one:?}");
        }
        // Another seed draws other weights, but sees the same clips in validation.
        let seed = |field: &'static str| {
            found(&["train.seed"], move |record| {
                record.arm["train"]["seed"] = 2.into();
                record.identity[field] = "other".into();
            })
        };
        assert_eq!(seed("initial_shared_weights"), [""; 0]);
        assert_eq!(seed("validation_clips").len(), 1);
    }

    fn work(arm: &str, samples: &[(u64, u64)]) -> ArmWork {
        let of =
            |&(step, samples)| (step, Work { full_lr_steps: samples / 4, full_lr_samples: samples, warmup_steps: 2 });
        ArmWork { arm: arm.into(), total: samples.last().map(|last| of(last).1), at: samples.iter().map(of).collect() }
    }

    #[test]
    fn points_after_unequal_work_are_told_and_matched() {
        let baseline = work("m1", &[(0, 0), (10, 0), (20, 40), (30, 80), (40, 120)]);
        let candidate = work("m2", &[(0, 0), (10, 0), (20, 20), (30, 40), (40, 80)]);
        let words = unequal_work(&baseline, &candidate).expect("unequal");
        assert!(words.contains("at step 20 m1 had seen 40 samples at full learning rate, m2 20"), "{words}");
        assert_eq!(unequal_work(&baseline, &baseline.clone()), None);
        let points = ArmPoints {
            arm: "m2".into(),
            points: [0, 10, 20, 30, 40].map(|step| (step, Point::new([clip("a@0", step as f64)]))).into(),
        };
        let (moved, pairs) = at_equal_work(&baseline, &candidate, &points);
        assert_eq!(pairs, [(0, 0), (20, 30), (30, 40)]);
        let values: Vec<(u64, f64)> =
            moved.points.iter().map(|(step, point)| (*step, point.clips["a@0"].wrist_lpips)).collect();
        assert_eq!(values, [(0, 0.0), (20, 30.0), (30, 40.0)]);
        assert_eq!(
            work("m1", &[(6, 1600)]).line().as_deref(),
            Some("m1: 400 steps at full learning rate, 1,600 samples; 0.5 % of all steps were warm-up")
        );
    }
}
