//! What a chart can show: each metric's name, unit, direction and where its points come from.

use super::format;
use crate::runlog::{Series, ValidationEvent};

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    Lower,
    Higher,
    /// No direction: memory in use is neither.
    Neither,
}

/// Where a metric's points come from.
#[derive(Clone, Copy)]
pub enum Source {
    /// One point a validation.
    Validation(fn(&ValidationEvent) -> f64),
    /// One point an optimizer step.
    Step(fn(&Series) -> &Vec<f32>),
}

/// A quantity over steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Metric {
    WristLpips,
    WristPsnr,
    WristSsim,
    PositionError,
    RotationError,
    Loss,
    StepTime,
    Memory,
    PaddingWaste,
}

impl Metric {
    /// In the order in which `[` and `]` walk; the deciding one first.
    pub const ALL: [Self; 9] = [
        Self::WristLpips,
        Self::WristPsnr,
        Self::WristSsim,
        Self::PositionError,
        Self::RotationError,
        Self::Loss,
        Self::StepTime,
        Self::Memory,
        Self::PaddingWaste,
    ];

    /// The name on panels.
    pub fn title(self) -> &'static str {
        match self {
            Self::WristLpips => "wrist LPIPS",
            Self::WristPsnr => "wrist PSNR",
            Self::WristSsim => "wrist SSIM",
            Self::PositionError => "position error",
            Self::RotationError => "rotation error",
            Self::Loss => "loss",
            Self::StepTime => "step time",
            Self::Memory => "memory",
            Self::PaddingWaste => "padding waste",
        }
    }

    /// Which way is better.
    pub fn better(self) -> Better {
        match self {
            Self::WristPsnr | Self::WristSsim => Better::Higher,
            Self::Memory => Better::Neither,
            _ => Better::Lower,
        }
    }

    /// `↓`, `↑` or nothing.
    pub fn arrow(self) -> &'static str {
        match self.better() {
            Better::Lower => " ↓",
            Better::Higher => " ↑",
            Better::Neither => "",
        }
    }

    /// Where its points come from.
    pub fn source(self) -> Source {
        match self {
            Self::WristLpips => Source::Validation(|event| event.wrist_lpips),
            Self::WristPsnr => Source::Validation(|event| event.wrist_psnr),
            Self::WristSsim => Source::Validation(|event| event.wrist_ssim),
            Self::PositionError => Source::Validation(|event| event.trans_l2_m),
            Self::RotationError => Source::Validation(|event| event.rot_deg),
            Self::Loss => Source::Step(|series| &series.loss),
            Self::StepTime => Source::Step(|series| &series.step_ms),
            Self::Memory => Source::Step(|series| &series.memory_bytes),
            Self::PaddingWaste => Source::Step(|series| &series.padding_waste),
        }
    }

    /// Measured at validations only.
    pub fn is_validation(self) -> bool {
        matches!(self.source(), Source::Validation(_))
    }

    /// A value with its unit; without one where there is no value.
    pub fn value(self, value: f64) -> String {
        match self {
            _ if value.is_nan() => format::NOTHING.into(),
            Self::WristLpips | Self::WristSsim => {
                if value.is_finite() {
                    format!("{value:.4}")
                } else {
                    format::significant(value)
                }
            }
            Self::WristPsnr => format!("{} dB", format::significant_digits(value, 4)),
            Self::PositionError => format!("{} m", format::significant(value)),
            Self::RotationError => format!("{}°", format::significant(value)),
            Self::Loss => format::significant(value),
            Self::StepTime => format::milliseconds(value),
            Self::Memory => format::bytes(value),
            Self::PaddingWaste => format::percent(value),
        }
    }

    /// The least value worth telling from zero, for a metric that is often exactly zero and spans decades besides: below
    /// it a logarithmic axis goes on evenly down to zero.
    pub fn even_below(self) -> Option<f64> {
        (self == Self::PaddingWaste).then_some(0.001)
    }

    /// A tick of the y axis: short, the unit where it scales with the value.
    pub fn tick(self, value: f64) -> String {
        match self {
            Self::StepTime | Self::Memory | Self::PaddingWaste => self.value(value),
            _ => format::significant(value),
        }
    }
}
