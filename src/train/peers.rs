//! Does this arm begin as the experiment's other arms began? A comparison that is void before the first step is not worth a
//! GPU, so it ends here and not in the verdict.

use crate::eval::verdict::{StepZero, compare_step_zero, load_points};
use crate::runlog::RunDir;
use crate::{Error, Result};
use serde_json::Value;

/// What arms that start equal must have in common from their identity: the clips in their order, and the weights.
const SHARED: [&str; 6] =
    ["data", "training_clips", "training_episodes", "validation_clips", "validation_chunks", "initial_shared_weights"];

/// Refuses other clips or other weights than the peers that have begun were bound to.
///
/// # Errors
/// `arms_differ` (exit 78) with the first difference.
pub fn check_identity(identity: &Value, peers: &[RunDir]) -> Result<()> {
    for peer in peers {
        // What is absent or damaged there is that run's own affair.
        let Ok(bytes) = std::fs::read(peer.identity()) else { continue };
        let Ok(theirs) = serde_json::from_slice::<Value>(&bytes) else { continue };
        let pairs = SHARED.map(|field| (field, &identity[field], &theirs[field]));
        if let Some((field, here, there)) = pairs.into_iter().find(|(_, here, there)| here != there) {
            let what = format!("{field} is {here} here and {there} in an arm that this one is to be compared with");
            return Err(Error::refused("arms_differ", what).at(peer.identity()).hint(ANEW));
        }
    }
    Ok(())
}

/// Refuses to go on from step 0 unless it was measured there as in the peers, to the last digit. A peer that has not come so
/// far looks for itself.
///
/// # Errors
/// `arms_differ` (exit 78) with the first difference; those of [`load_points`].
pub fn check_start(run: &RunDir, peers: &[RunDir]) -> Result<()> {
    let ours = load_points(run.root())?;
    for peer in peers.iter().filter(|peer| peer.root().is_dir()) {
        let theirs = load_points(peer.root())?;
        if let StepZero::Differs { clip, field, baseline, candidate } = compare_step_zero(&theirs, &ours) {
            let what = format!(
                "before the first step {field} of {clip} is {candidate} here and {baseline} in an arm that this one is to be \
                 compared with"
            );
            return Err(Error::refused("arms_differ", what).at(peer.validation_metrics(0)).hint(ANEW));
        }
    }
    Ok(())
}

const ANEW: &str =
    "no difference between these arms could be laid to what is ablated: begin all of them anew with --fresh";
