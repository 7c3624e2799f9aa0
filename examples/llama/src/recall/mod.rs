//! Accuracy of a cache policy on recall tasks, paired with full attention in memory on the same prompts.

mod calibrate;
mod compare;
mod drift;
mod plot;
mod prompts;
mod report;
mod run;

pub use calibrate::{collect, fit};
pub use compare::{Comparison, Plan, Row, compare};
pub use drift::Drift;
pub use plot::svg;
pub use prompts::{Prompt, load};
pub use report::{Cell, Report, pipeline_line};
pub use run::{Answers, STATE, answer, run};
