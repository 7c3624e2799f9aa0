//! Accuracy of a cache policy on recall tasks, paired with full attention in memory on the same prompts.

mod prompts;
mod report;
mod run;

pub use prompts::{Prompt, load};
pub use report::{Cell, Report};
pub use run::{Answers, STATE, answer, run};
