use super::*;
use proptest::prelude::*;

fn lists(clusters: &[&[u32]]) -> ClusterLists {
    let mut lists = ClusterLists::new();
    clusters.iter().for_each(|members| lists.push(members));
    lists
}

/// Two clusters on a line, around 0.5 and 10.5, with entries 0 to 3.
fn two_clusters(options: AdaptOptions) -> AdaptiveClusters {
    AdaptiveClusters::new(&[0.0, 1.0, 10.0, 11.0], 1, &lists(&[&[0, 1], &[2, 3]]), options).unwrap()
}

#[test]
fn an_entry_joins_the_nearest_cluster_while_the_variance_allows_it() {
    let mut clusters = two_clusters(AdaptOptions { threshold: 1.0, ..AdaptOptions::default() });
    assert_eq!(clusters.append(4, &[2.0]).unwrap(), Adaptation::Joined(0));
    assert_eq!((clusters.members(0).unwrap(), clusters.centroids()[0]), (&[0, 1, 4][..], 1.0));
    assert!((clusters.stats()[0].variance() - 2.0 / 3.0).abs() < 1e-6);
    assert_eq!(clusters.append(5, &[8.0]).unwrap(), Adaptation::Buffered(1));
    // A flagged cluster buffers every further entry, also one that fits.
    assert_eq!(clusters.append(6, &[10.5]).unwrap(), Adaptation::Buffered(1));
    assert_eq!(clusters.next_split(), None);
    assert_eq!((clusters.buffer(1).unwrap(), clusters.buffered()), (&[5, 6][..], 2));
}

#[test]
fn a_flagged_cluster_is_split_when_it_is_retrieved() {
    let mut clusters = two_clusters(AdaptOptions { threshold: 1.0, ..AdaptOptions::default() });
    clusters.append(4, &[7.0]).unwrap();
    clusters.append(5, &[7.5]).unwrap();
    clusters.begin_step(&[0, 1]).unwrap();
    let request = SplitRequest { cluster: 1, must_load: false };
    assert_eq!(clusters.next_split(), Some(request));
    assert_eq!(clusters.next_split(), Some(request), "the request stays until the split");
    for refused in [clusters.append(6, &[0.0]).unwrap_err(), clusters.begin_step(&[]).unwrap_err()] {
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(clusters.entries_to_split(1).unwrap(), [2, 3, 4, 5]);
    assert_eq!(clusters.split(1, &[10.0, 11.0, 7.0, 7.5]).unwrap(), [1, 2]);
    assert_eq!(
        (clusters.members(1).unwrap(), clusters.members(2).unwrap(), clusters.buffered()),
        (&[2, 3][..], &[4, 5][..], 0)
    );
    assert_eq!(clusters.next_split(), None);
}

#[test]
fn a_cluster_in_memory_is_split_at_once() {
    let mut clusters = two_clusters(AdaptOptions { threshold: 1.0, min_split: 2, ..AdaptOptions::default() });
    clusters.begin_step(&[1]).unwrap();
    assert_eq!(clusters.append(4, &[14.0]).unwrap(), Adaptation::SplitDue(1));
    assert_eq!(clusters.next_split(), Some(SplitRequest { cluster: 1, must_load: false }));
    assert_eq!(clusters.split(1, &[10.0, 11.0, 14.0]).unwrap(), [1, 2]);
    assert_eq!((clusters.members(1).unwrap(), clusters.members(2).unwrap()), (&[2, 3][..], &[4][..]));
    // The new cluster is in memory as well.
    assert_eq!(clusters.append(5, &[17.0]).unwrap(), Adaptation::SplitDue(2));
}

#[test]
fn full_buffers_load_the_cluster_with_the_most_entries() {
    let mut clusters = two_clusters(AdaptOptions { threshold: 0.5, buffer_limit: 3, ..AdaptOptions::default() });
    clusters.append(4, &[3.0]).unwrap();
    clusters.append(5, &[8.0]).unwrap();
    assert_eq!(clusters.next_split(), None);
    clusters.append(6, &[8.5]).unwrap();
    assert_eq!(clusters.next_split(), Some(SplitRequest { cluster: 1, must_load: true }));
    clusters.split(1, &[10.0, 11.0, 8.0, 8.5]).unwrap();
    assert_eq!(clusters.next_split(), None);
    assert_eq!(clusters.buffer(0).unwrap(), [4]);
}

#[test]
fn requested_splits_take_the_fullest_buffer_and_then_the_older_cluster() {
    let keys = [0.0, 1.0, 10.0, 11.0, 20.0, 21.0];
    let options = AdaptOptions { threshold: 0.5, ..AdaptOptions::default() };
    let mut clusters = AdaptiveClusters::new(&keys, 1, &lists(&[&[0, 1], &[2, 3], &[4, 5]]), options).unwrap();
    let new = [3.0, 18.0, 8.0, 8.5];
    for (entry, key) in (6..).zip(new) {
        assert!(matches!(clusters.append(entry, &[key]).unwrap(), Adaptation::Buffered(_)));
    }
    assert_eq!((clusters.next_split(), clusters.is_split_due()), (None, false));
    assert_eq!(clusters.buffer_sizes().collect::<Vec<_>>(), [1, 2, 1]);
    let mut order = Vec::new();
    while let Some(cluster) = clusters.request_split() {
        let request = SplitRequest { cluster, must_load: true };
        assert_eq!((clusters.next_split(), clusters.request_split()), (Some(request), Some(cluster)));
        clusters.withdraw_split();
        assert_eq!((clusters.next_split(), clusters.buffer(cluster).unwrap().is_empty()), (None, false));
        assert_eq!(clusters.request_split(), Some(cluster), "a withdrawn request leaves the cluster flagged");
        let due = clusters.entries_to_split(cluster).unwrap();
        let rows: Vec<f32> = due.iter().map(|at| keys.iter().chain(&new).copied().nth(*at as usize).unwrap()).collect();
        clusters.split(cluster, &rows).unwrap();
        order.push(cluster);
    }
    assert_eq!((order, clusters.buffered()), (vec![1, 0, 2], 0));
    let mut seen: Vec<u32> = members(&clusters).concat();
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..10));
}

#[test]
fn equal_keys_are_split_by_size() {
    let options = AdaptOptions { threshold: 1.0, max_size: 8, buffer_limit: 0, ..AdaptOptions::default() };
    let mut clusters = AdaptiveClusters::new(&[5.0], 1, &lists(&[&[0]]), options).unwrap();
    for entry in 1..200 {
        clusters.append(entry, &[5.0]).unwrap();
        while let Some(request) = clusters.next_split() {
            let keys = vec![5.0; clusters.entries_to_split(request.cluster).unwrap().len()];
            clusters.split(request.cluster, &keys).unwrap();
        }
    }
    let sizes: Vec<u32> = clusters.stats().iter().map(ClusterStats::size).collect();
    assert!(sizes.iter().all(|size| (4..=8).contains(size)), "{sizes:?}");
}

#[test]
fn wrong_input_is_refused() {
    let refused = |keys: &[f32], clusters: &[&[u32]], options| {
        let error = AdaptiveClusters::new(keys, 1, &lists(clusters), options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    };
    let good = AdaptOptions::default();
    refused(&[1.0], &[], good);
    refused(&[1.0], &[&[0], &[]], good);
    refused(&[1.0], &[&[1]], good);
    refused(&[f32::NAN], &[&[0]], good);
    for threshold in [f64::NAN, f64::INFINITY, -1.0] {
        refused(&[1.0], &[&[0]], AdaptOptions { threshold, ..good });
        assert!(two_clusters(good).set_threshold(threshold).is_err());
        assert!(two_clusters(good).quantile_of_variances(threshold).is_err());
    }
    refused(&[1.0], &[&[0]], AdaptOptions { min_split: 1, ..good });
    refused(&[1.0], &[&[0]], AdaptOptions { max_size: 3, ..good });
    let mut clusters = two_clusters(good);
    assert!(clusters.append(4, &[1.0, 2.0]).is_err() && clusters.append(4, &[f32::INFINITY]).is_err());
    assert!(clusters.begin_step(&[2]).is_err() && clusters.split(0, &[0.0, 1.0]).is_err());
    assert_eq!(clusters.quantile_of_variances(1.0).unwrap(), 0.25);
}

#[test]
fn entries_of_a_cluster_that_does_not_exist_are_refused() {
    let clusters = two_clusters(AdaptOptions::default());
    let refused = [clusters.members(2).err(), clusters.buffer(2).err(), clusters.entries_to_split(2).err()];
    for error in refused {
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("cluster 2 of 2"), "{error}");
    }
}

#[test]
fn a_state_takes_at_most_the_bytes_that_it_announced() {
    let keys: Vec<f32> = (0..900).map(|at| (at * 37 % 101) as f32).collect();
    for precision in [CentroidPrecision::Single, CentroidPrecision::Byte] {
        let options = AdaptOptions { threshold: 9.0, max_size: 12, buffer_limit: 3, precision, ..Default::default() };
        let first = ClusterLists::from_assignment(&(0..60).map(|at| at % 7).collect::<Vec<u32>>(), 7).unwrap();
        let most = AdaptiveClusters::bytes_for(7, 3, 60, precision);
        let mut clusters = AdaptiveClusters::new(&keys[..180], 3, &first, options).unwrap();
        assert!(clusters.bytes() <= most && clusters.bytes() <= clusters.bytes_once(7, 0), "{most}");
        for entry in 60..300_u32 {
            let most = clusters.bytes_once(clusters.len() + 30, 1) + AdaptiveClusters::expected_bytes(300, 3);
            clusters.begin_step(&[entry % 7]).unwrap();
            if entry % 8 == 0 {
                clusters.expect(&keys[entry as usize * 3..][..12]).unwrap();
            }
            clusters.append(entry, &keys[entry as usize * 3..][..3]).unwrap();
            while let Some(request) = clusters.next_split() {
                let due = clusters.entries_to_split(request.cluster).unwrap();
                let rows: Vec<f32> = due.iter().flat_map(|at| &keys[*at as usize * 3..][..3]).copied().collect();
                clusters.split(request.cluster, &rows).unwrap();
            }
            assert!(clusters.bytes() <= most, "entry {entry}: {} of {most}", clusters.bytes());
        }
        clusters.forget_expected();
        assert!(clusters.bytes() <= clusters.bytes_once(clusters.len(), 0));
    }
}

/// Appends keys in steps. Each step retrieves the clusters of its bits. If `expects`, the keys of a step are compared
/// together.
fn grow(
    keys: &[f32],
    dim: usize,
    retrieved: &[u64],
    (per_step, expects): (usize, bool),
    options: AdaptOptions,
) -> AdaptiveClusters {
    let first = ClusterLists::from_assignment(&[0, 1, 0, 1, 0, 1], 2).unwrap();
    let mut clusters = AdaptiveClusters::new(&keys[..6 * dim], dim, &first, options).unwrap();
    let entries: Vec<u32> = (6..(keys.len() / dim) as u32).collect();
    for (step, entries) in entries.chunks(per_step).enumerate() {
        let bits = retrieved[step * per_step / 4 % retrieved.len()];
        if (step * per_step).is_multiple_of(4) {
            let chosen: Vec<u32> = (0..clusters.len() as u32).filter(|c| bits >> (c % 64) & 1 == 1).collect();
            clusters.begin_step(&chosen).unwrap();
        }
        if expects {
            clusters.expect(&keys[entries[0] as usize * dim..][..entries.len() * dim]).unwrap();
        }
        for entry in entries {
            clusters.append(*entry, &keys[*entry as usize * dim..][..dim]).unwrap();
            while let Some(request) = clusters.next_split() {
                let due = clusters.entries_to_split(request.cluster).unwrap();
                let rows: Vec<f32> = due.iter().flat_map(|at| &keys[*at as usize * dim..][..dim]).copied().collect();
                clusters.split(request.cluster, &rows).unwrap();
            }
        }
    }
    clusters
}

/// Returns the members of each cluster.
fn members(clusters: &AdaptiveClusters) -> Vec<&[u32]> {
    (0..clusters.len()).map(|cluster| clusters.members_of(cluster)).collect()
}

#[test]
fn centroids_of_bytes_follow_keys_that_move_slowly() {
    // Clusters of 16 that grow to 64. Each new key is a fifth of a standard deviation further in every dimension.
    let (dim, clusters, first, last) = (64, 12, 16, 64);
    let mut random = SeededRandom::new(5);
    let centres: Vec<f32> = (0..clusters * dim).map(|_| random.normal() as f32).collect();
    let mut keys = Vec::new();
    for at in 0..clusters * last {
        let shift = if at / clusters < first { 0.0 } else { 0.2 };
        let centre = &centres[at % clusters * dim..][..dim];
        keys.extend(centre.iter().map(|x| x + shift + 0.3 * random.normal() as f32));
    }
    let initial: Vec<u32> = (0..clusters * first).map(|at| (at % clusters) as u32).collect();
    let initial = ClusterLists::from_assignment(&initial, clusters).unwrap();
    let options = AdaptOptions { precision: CentroidPrecision::Byte, ..AdaptOptions::default() };
    let mut found = AdaptiveClusters::new(&keys[..clusters * first * dim], dim, &initial, options).unwrap();
    for at in clusters * first..clusters * last {
        let joined = found.append(at as u32, &keys[at * dim..][..dim]).unwrap();
        assert_eq!(joined, Adaptation::Joined((at % clusters) as u32));
    }
    let (mut bias, mut squares, mut step) = (0.0, 0.0, 0.0);
    for (cluster, centroid) in found.centroids().chunks(dim).enumerate() {
        let largest = centroid.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        step += f64::from(largest) / 127.0 / clusters as f64;
        for (d, x) in centroid.iter().enumerate() {
            let column = (0..last).map(|member| f64::from(keys[(member * clusters + cluster) * dim + d]));
            let error = f64::from(*x) - column.sum::<f64>() / last as f64;
            bias += error / (clusters * dim) as f64;
            squares += error * error / (clusters * dim) as f64;
        }
    }
    // 48 roundings: no bias, and an error of about two steps.
    assert!(bias.abs() < 0.3 * step && squares.sqrt() < 3.0 * step, "{bias} {} {step}", squares.sqrt());
}

proptest! {
    #[test]
    fn every_entry_is_in_one_place_and_statistics_are_exact(
        keys in prop::collection::vec(-4.0_f32..4.0, 20..400), retrieved in prop::collection::vec(any::<u64>(), 1..9),
        threshold in 0.1_f64..6.0, max_size in 4_usize..20, buffer_limit in 0_usize..20,
    ) {
        let keys = &keys[..keys.len() / 2 * 2];
        let options = AdaptOptions { threshold, max_size, buffer_limit, ..AdaptOptions::default() };
        let clusters = grow(keys, 2, &retrieved, (1, false), options);
        let own = |cluster| clusters.entries_to_split(cluster).unwrap();
        let mut seen: Vec<u32> = (0..clusters.len() as u32).flat_map(own).collect();
        seen.sort_unstable();
        prop_assert!(seen.into_iter().eq(0..(keys.len() / 2) as u32));
        prop_assert!(clusters.buffered() < buffer_limit.max(1));
        for (at, (stats, centroid)) in clusters.stats().iter().zip(clusters.centroids().chunks(2)).enumerate() {
            let members = clusters.members(at as u32).unwrap();
            prop_assert!(members.len() == stats.size() as usize && (1..=max_size).contains(&members.len()));
            let size = members.len() as f64;
            let mut variance = 0.0;
            for d in 0..2 {
                let column = |e: &u32| f64::from(keys[*e as usize * 2 + d]);
                let mean = members.iter().map(column).sum::<f64>() / size;
                variance += members.iter().map(|e| (column(e) - mean).powi(2)).sum::<f64>() / size;
                prop_assert!((mean - f64::from(centroid[d])).abs() < 1e-4);
            }
            prop_assert!((stats.variance() - variance).abs() < 1e-4);
            let is_initial = at < 2;
            prop_assert!(is_initial || variance <= threshold + 1e-4 || members.len() < options.min_split);
        }
        // The same entries and steps give the same clusters, however the entries are cut into pieces.
        for expects in [false, true] {
            let again = grow(keys, 2, &retrieved, (4, expects), options);
            prop_assert_eq!(again.centroids(), clusters.centroids());
            prop_assert_eq!(members(&again), members(&clusters));
        }
        // Requested splits empty the buffers, one after the other, and lose no entry.
        let (mut split, flagged) = (clusters.clone(), clusters.buffer_sizes().count());
        split.forget_expected();
        let most = split.bytes_once(split.len() + flagged * (max_size + buffer_limit), 0);
        let mut sizes = Vec::new();
        while let Some(cluster) = split.request_split() {
            sizes.push(split.buffer(cluster).unwrap().len());
            let due = split.entries_to_split(cluster).unwrap();
            let rows: Vec<f32> = due.iter().flat_map(|at| &keys[*at as usize * 2..][..2]).copied().collect();
            split.split(cluster, &rows).unwrap();
            prop_assert!(split.bytes() <= most);
        }
        prop_assert!(split.buffered() == 0 && sizes.len() == flagged && sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
        let mut seen = members(&split).concat();
        seen.sort_unstable();
        prop_assert!(seen.into_iter().eq(0..(keys.len() / 2) as u32));
        // Bytes round by at most one step each time that a centroid moves. A step is a 127th of the largest element.
        let bytes = AdaptOptions { precision: CentroidPrecision::Byte, ..options };
        let [one, four] = [1, 4].map(|per_step| grow(keys, 2, &retrieved, (per_step, per_step > 1), bytes));
        prop_assert_eq!((one.centroids(), members(&one)), (four.centroids(), members(&four)));
        for (members, centroid) in members(&one).iter().zip(one.centroids().chunks(2)) {
            // The rounding of a centroid of k entries has a weight of k when the next entry joins.
            let most = 4.0 / 127.0 * (members.len() as f32 + 1.0) / 2.0;
            for d in 0..2 {
                let sum: f32 = members.iter().map(|entry| keys[*entry as usize * 2 + d]).sum();
                prop_assert!((sum / members.len() as f32 - centroid[d]).abs() <= most, "{members:?}");
            }
        }
    }
}
