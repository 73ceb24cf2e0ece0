//! How often to save, and what preemption costs: survival of attempts, the best interval, hours and tries to the end.
//!
//! Nothing here assumes that attempts die at a constant rate: on real clusters most die young. [`Survival`] is estimated
//! from attempts, those that ended for another reason included; everything else follows from that curve and from what was
//! measured of the run. Pure; `cli` and the console bring the figures.

mod cost;
mod lifetimes;
mod report;
mod simulate;
mod survival;

pub use cost::{Costs, best_interval, daly, steps_an_attempt, young};
pub use lifetimes::{Lifetime, from_csv, from_rows};
pub use report::{Plan, Row};
pub use simulate::{Simulation, simulate, tries_interval};
pub use survival::Survival;
