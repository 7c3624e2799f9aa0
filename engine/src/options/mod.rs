//! Settings, apart from the components that use them.

mod cache;
mod clusters;
mod compute_threads;
mod sequence;
mod size;
mod store;

pub use cache::{CacheOptions, CachePolicy, ReadCost};
pub use clusters::{ClusterStripe, StoreClusterOptions};
pub use compute_threads::ComputeThreads;
#[cfg(test)]
pub(crate) use compute_threads::NewThreads;
pub(crate) use compute_threads::for_each;
pub use sequence::{Budget, CreateOptions, Durability, StoredSummary, SummaryResidency};
pub use size::ByteSize;
pub use store::{BalancePolicy, ChecksumChoice, DriverChoice, HelperUse, StoreOptions};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use std::time::Duration;

    #[test]
    fn sizes_are_read_from_numbers_and_from_text() {
        use serde::Deserialize;
        use serde::de::IntoDeserializer;
        use serde::de::value::Error as SerdeError;
        let number = |n: u64| ByteSize::deserialize(IntoDeserializer::<SerdeError>::into_deserializer(n));
        let signed = |n: i64| ByteSize::deserialize(IntoDeserializer::<SerdeError>::into_deserializer(n));
        let text = |t: &'static str| ByteSize::deserialize(IntoDeserializer::<SerdeError>::into_deserializer(t));
        assert_eq!((number(4096).unwrap(), signed(4096).unwrap()), (ByteSize::kib(4), ByteSize::kib(4)));
        assert_eq!((text("64KiB").unwrap(), text("1.5 GiB").unwrap()), (ByteSize::kib(64), ByteSize::mib(1536)));
        assert!(signed(-1).unwrap_err().to_string().contains("a number of bytes, or a text such as 64KiB"));
        assert!(text("many").unwrap_err().to_string().contains("write 64KiB, 512MiB or 2GiB"));
    }

    #[test]
    fn documented_defaults_hold() {
        let options = StoreOptions::default();
        assert_eq!(options.memory_limit, ByteSize::mib(512));
        assert_eq!((options.segment_bytes, options.segment_size()), (None, ByteSize::mib(64)));
        let of = |capacity, devices: u32| {
            let options = (0..devices).fold(StoreOptions::default(), |options, i| options.device(i.to_string()));
            options.capacity(capacity).segment_size()
        };
        assert_eq!(of(ByteSize::mib(64), 1), ByteSize::mib(4));
        assert_eq!(of(ByteSize::gib(5), 1), ByteSize::mib(16));
        assert_eq!(of(ByteSize::gib(5), 2), ByteSize::mib(8));
        assert_eq!(of(ByteSize::gib(500), 2), ByteSize::mib(64));
        assert_eq!(options.frame_bytes, ByteSize::mib(4));
        assert_eq!(options.lazy_delay, Duration::from_secs(1));
        assert!(!options.allow_degraded && options.balance == BalancePolicy::EarliestFinish);
        assert_eq!(options.attend_helper, HelperUse::Auto);
        assert_eq!(options.hedge_percentile, Some(0.99));
        assert_eq!(options.cleaning_rate, None);
        assert_eq!((options.high_watermark, options.low_watermark), (0.95, 0.90));
        assert!(options.create && options.capacity.is_none() && options.devices.is_empty() && options.cache.is_none());
        assert_eq!(CacheOptions::new(ByteSize(0)).policy, CachePolicy::default());
    }

    #[test]
    fn a_delay_is_whole_milliseconds() {
        let delay = |delay| StoreOptions::default().lazy_delay(delay).lazy_delay;
        assert_eq!(delay(Duration::ZERO), Duration::ZERO);
        assert_eq!(delay(Duration::from_nanos(1)), Duration::from_millis(1));
        assert_eq!(delay(Duration::from_micros(2500)), Duration::from_millis(3));
        // The time of the sync is still a point in time.
        assert_eq!(delay(Duration::MAX), Duration::from_millis(u64::MAX));
        assert!(std::time::Instant::now().checked_add(delay(Duration::MAX)).is_some());
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in
            [("4096", 4096), ("64KiB", 65536), ("512M", 512 << 20), ("1.5 GiB", 3 << 29), ("1t", 1 << 40)]
        {
            assert_eq!(text.parse::<ByteSize>().unwrap().bytes(), bytes, "{text}");
        }
        for text in ["", "x", "1Q", "-4", "1e3", "999999999999T"] {
            assert_eq!(text.parse::<ByteSize>().unwrap_err().kind(), ErrorKind::InvalidArgument, "{text}");
        }
    }

    #[test]
    fn budgets_count_tokens() {
        assert_eq!(Budget::tokens(400).of(4096).unwrap(), 400);
        assert_eq!(Budget::tokens(400).of(100).unwrap(), 100);
        assert_eq!(Budget::share(1.0 / 13.0).of(4096).unwrap(), 315);
        for bad in [Budget::tokens(0), Budget::share(0.0), Budget::share(1.5), Budget::share(f64::NAN)] {
            assert!(bad.of(10).is_err());
        }
    }
}
