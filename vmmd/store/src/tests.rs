use std::collections::BTreeMap;

use redb::ReadableTableMetadata as _;

use super::{
    answers::{Limit, Limits},
    migration::{MIGRATIONS, OLDEST},
    *,
};

fn key() -> Key {
    Key::of(&[7; 32])
}

fn record(uid: u8, name: &str) -> VmRecord {
    VmRecord {
        uid: vec![uid; 16],
        name: name.to_owned(),
        generation: 1,
        ..VmRecord::default()
    }
}

fn names(records: &[VmRecord]) -> Vec<&str> {
    records.iter().map(|record| record.name.as_str()).collect()
}

#[tokio::test]
async fn what_was_acknowledged_is_there_after_a_new_start() {
    let folder = tempfile::tempdir().unwrap();
    {
        let (store, records) = Store::open(folder.path(), &key()).unwrap();
        assert_eq!((records.vms, records.disks), (Vec::new(), Vec::new()));
        store.put(&record(1, "a")).await.unwrap();
        store.put(&record(2, "b")).await.unwrap();
        store.put(&record(1, "c")).await.unwrap();
        store
            .remove::<VmRecord>(&[2; 16], Some(tombstone(1)), None)
            .await
            .unwrap();
    }
    assert_eq!(names(&reopen(folder.path()).vms), ["c"]);
}

/// The thread closes the file some time after the last handle is gone.
fn reopen(folder: &Path) -> Records {
    reopen_store(folder).1
}

fn reopen_store(folder: &Path) -> (Store, Records) {
    loop {
        match Store::open(folder, &key()) {
            Ok(opened) => return opened,
            Err(Error::Failed(_, cause)) if cause.contains("already open") => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn many_changes_at_once_are_all_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(folder.path(), &key()).unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for uid in 0..100 {
        let store = store.clone();
        tasks.spawn(async move { store.put(&record(uid, "x")).await });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap().unwrap();
    }
    drop(store);
    assert_eq!(reopen(folder.path()).vms.len(), 100);
}

fn store_of_schema(schema: u64) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let database = open(&folder.path().join(FILE), &key()).unwrap();
    write(&database, |transaction| {
        let mut meta = transaction.open_table(META).unwrap();
        meta.insert("schema", schema).unwrap();
        Ok(())
    })
    .unwrap();
    folder
}

#[test]
fn store_of_a_newer_or_unknown_older_schema_is_refused() {
    let folder = store_of_schema(SCHEMA + 1);
    let refused = Store::open(folder.path(), &key());
    assert!(matches!(refused, Err(Error::Newer(schema)) if schema == SCHEMA + 1));
    let folder = store_of_schema(OLDEST - 1);
    let refused = Store::open(folder.path(), &key());
    assert!(matches!(refused, Err(Error::Older(schema)) if schema == OLDEST - 1));
}

#[test]
fn there_is_a_migration_for_each_older_schema() {
    assert_eq!(u64::try_from(MIGRATIONS.len()).unwrap(), SCHEMA - OLDEST);
}

#[tokio::test]
async fn who_cancels_and_then_writes_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(folder.path(), &key()).unwrap();
    let of = |name: &str| VmRecord {
        uid: vec![1; 16],
        name: name.into(),
        ..VmRecord::default()
    };
    let cancelled = CancellationToken::new();
    assert!(store.put_unless(&cancelled, &of("first")).await.unwrap());
    assert_eq!(store.vm(&[1; 16]).await.unwrap(), Some(of("first")));
    // It is decided when the write's turn comes, which is after the other's.
    cancelled.cancel();
    store.put(&of("other")).await.unwrap();
    assert!(!store.put_unless(&cancelled, &of("stale")).await.unwrap());
    assert_eq!(store.vm(&[1; 16]).await.unwrap(), Some(of("other")));
}

#[test]
fn garbage_in_place_of_the_store_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(FILE), vec![0x5a; 8192]).unwrap();
    assert!(matches!(
        Store::open(folder.path(), &key()),
        Err(Error::Failed(..))
    ));
}

#[tokio::test]
async fn a_record_keeps_every_field() {
    let folder = tempfile::tempdir().unwrap();
    let nic = NicHardware {
        slot: 3,
        mac: vec![2, 0, 0, 0, 0, 1],
        pod_address: 0x0a00_0202,
    };
    let full = VmRecord {
        labels: [("a".to_owned(), "b".to_owned())].into(),
        created_ms: 5,
        spec: Some(vmmd_api::v1::VmSpec {
            memory: Some(vmmd_api::v1::MemorySpec {
                size_bytes: 1 << 28,
                backing: 1,
                ..Default::default()
            }),
            ..Default::default()
        }),
        hardware: Some(Hardware {
            rng_slot: 1,
            processor: Some(ProcessorRecord {
                model: "x86-64-v3".into(),
                add: vec!["aes".into()],
                remove: vec!["fma".into()],
                features: vec!["aes".into(), "avx2".into()],
            }),
            disk_slots: [("root".to_owned(), 10)].into(),
            nics: [("eth0".to_owned(), nic)].into(),
            share_slots: [("data".to_owned(), 95)].into(),
            firmware: 2,
        }),
        intent: Intent::Running.into(),
        instance: Some(InstanceRecord {
            spec: None,
            hardware: None,
            taps: BTreeMap::from([("eth0".into(), "vm0n2".into())]),
            shared_memory: true,
            may_be_frozen: true,
            started: true,
            notified: true,
            cgroup: "/sys/fs/cgroup/kubepods/pod1/c/vmm".into(),
            user: 7,
            started_ms: 8,
            started_since_boot: 9,
            generation: 1,
            boot_id: "x".into(),
            attaching: vec!["a".into()],
            ejecting: vec!["b".into()],
            request_id: "r".into(),
            operation: "o".into(),
        }),
        last_exit: Some(vmmd_api::v1::ExitStatus {
            reason: 2,
            message: "m".into(),
            time: None,
        }),
        begun: vec![mark("r")],
        made_run: 3,
        made_revision: 4,
        access_keys: vec![AccessKeysRecord {
            user: "root".into(),
            keys: vec!["ssh-ed25519 A".into()],
        }],
        ..record(9, "full")
    };
    {
        let (store, _) = Store::open(folder.path(), &key()).unwrap();
        store.put(&full).await.unwrap();
    }
    assert_eq!(reopen(folder.path()).vms, [full]);
}

fn disk(uid: u8, name: &str) -> DiskRecord {
    DiskRecord {
        uid: vec![uid; 16],
        name: name.to_owned(),
        size_bytes: 512,
        stage: DiskStage::Ready.into(),
        ..DiskRecord::default()
    }
}

#[tokio::test]
async fn disks_are_kept_beside_vms_also_with_the_same_key() {
    let folder = tempfile::tempdir().unwrap();
    {
        let (store, _) = Store::open(folder.path(), &key()).unwrap();
        store.put(&record(1, "vm")).await.unwrap();
        store.put(&disk(1, "disk")).await.unwrap();
        store.put(&disk(2, "gone")).await.unwrap();
        let metadata = vmmd_api::v1::ObjectMetadata {
            name: "gone".into(),
            generation: 7,
            ..Default::default()
        };
        let tombstone = Tombstone {
            run: 1,
            revision: 2,
            metadata: Some(metadata.into()),
            owned: 0,
            moved: false,
            pod: String::new(),
        };
        store
            .remove::<DiskRecord>(&[2; 16], Some(tombstone), None)
            .await
            .unwrap();
    }
    let records = reopen(folder.path());
    assert_eq!(
        (names(&records.vms), records.disks),
        (vec!["vm"], vec![disk(1, "disk")])
    );
    // Deletions of disks are remembered apart from those of VMs.
    let buried = &records.history.disks;
    assert_eq!((buried.tombstones.len(), buried.generation), (1, 7));
    assert!(records.history.vms.tombstones.is_empty());
}

fn tombstone(revision: u64) -> Tombstone {
    let metadata = vmmd_api::v1::ObjectMetadata {
        name: format!("vm{revision}"),
        ..Default::default()
    };
    Tombstone {
        run: 1,
        revision,
        metadata: Some(metadata.into()),
        owned: 0,
        moved: false,
        pod: String::new(),
    }
}

fn mark(id: &str) -> RequestMark {
    RequestMark {
        id: id.to_owned(),
        method: "StartVm".to_owned(),
        fingerprint: vec![7; 32],
        begun_ms: 5,
        caller: String::new(),
    }
}

fn answered(id: &str) -> RequestRecord {
    RequestRecord {
        mark: Some(mark(id)),
        ended_ms: vmmd_host::text::now_ms(),
        response: vec![2],
    }
}

#[tokio::test]
async fn each_opening_is_a_run_with_a_number_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let first = reopen(folder.path()).history;
    let second = reopen(folder.path()).history;
    assert_eq!((first.run, second.run), (1, 2));
    assert_eq!(second.nonces[&1], first.nonces[&1]);
    assert_ne!(second.nonces[&2], second.nonces[&1]);
}

#[tokio::test]
async fn a_deletion_is_remembered_with_the_answers_that_it_is() {
    let folder = tempfile::tempdir().unwrap();
    {
        let (store, _) = Store::open(folder.path(), &key()).unwrap();
        store.put(&record(1, "a")).await.unwrap();
        store
            .remove::<VmRecord>(&[1; 16], Some(tombstone(3)), [answered("x")])
            .await
            .unwrap();
        let found = store.request(RequestKey::new("", "x")).await.unwrap().unwrap();
        let ended_ms = found.ended_ms;
        assert_eq!(
            found,
            RequestRecord {
                ended_ms,
                ..answered("x")
            }
        );
        assert_eq!(store.request(RequestKey::new("", "y")).await.unwrap(), None);
    }
    let records = reopen(folder.path());
    assert_eq!(
        (records.vms, records.history.vms.tombstones),
        (Vec::new(), vec![tombstone(3)])
    );
}

#[tokio::test]
async fn the_oldest_deletions_are_forgotten_and_that_is_noted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    let database = open(&path, &key()).unwrap();
    write(&database, |transaction| {
        (1..=MAX_TOMBSTONES + 2)
            .try_for_each(|revision| history::bury(transaction, Deleted::Vm, &tombstone(revision)))
    })
    .unwrap();
    drop(database);
    let history = reopen(folder.path()).history;
    assert_eq!(history.vms.trimmed, (1, 2));
    assert_eq!(history.vms.tombstones.first(), Some(&tombstone(3)));
    assert_eq!(history.vms.tombstones.len() as u64, MAX_TOMBSTONES);
}

#[tokio::test]
async fn answers_are_forgotten_when_they_are_a_day_old() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(folder.path(), &key()).unwrap();
    let old = RequestRecord {
        ended_ms: vmmd_host::text::now_ms() - REQUEST_AGE_MS - 1,
        ..answered("old")
    };
    store.complete(old).await.unwrap();
    // With the next answer.
    store.complete(answered("x")).await.unwrap();
    assert_eq!(store.request(RequestKey::new("", "old")).await.unwrap(), None);
    assert!(store.request(RequestKey::new("", "x")).await.unwrap().is_some());
}

#[tokio::test]
async fn given_answer_is_not_replaced_by_a_deletion() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(folder.path(), &key()).unwrap();
    let presumed = |id| RequestRecord {
        response: vec![3],
        ..answered(id)
    };
    store.complete(answered("told")).await.unwrap();
    let answers = vec![presumed("told"), presumed("not told")];
    store
        .remove::<VmRecord>(&[2; 16], Some(tombstone(1)), answers)
        .await
        .unwrap();
    for (id, response) in [("told", [2]), ("not told", [3])] {
        let found = store.request(RequestKey::new("", id)).await.unwrap();
        assert_eq!(found.unwrap().response, response, "{id}");
    }
}

fn by(caller: &str, id: &str) -> RequestRecord {
    let mut record = answered(id);
    record.mark.as_mut().unwrap().caller = caller.to_owned();
    record
}

/// The ids of a caller that have answers.
async fn kept(store: &Store, caller: &str, ids: std::ops::Range<u32>) -> Vec<u32> {
    let mut kept = Vec::new();
    for id in ids {
        let key = RequestKey::new(caller, &id.to_string());
        if store.request(key).await.unwrap().is_some() {
            kept.push(id);
        }
    }
    kept
}

const NO_LIMIT: Limit = Limit {
    count: u64::MAX,
    bytes: u64::MAX,
};

/// Adds 6 answers of "greedy" and then 3 of "modest" within limits.
fn full(limits: Limits) -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let database = open(&folder.path().join(FILE), &key()).unwrap();
    write(&database, |transaction| {
        let greedy = (0..6).map(|id| by("greedy", &id.to_string()));
        let all: Vec<_> = greedy
            .chain((0..3).map(|id| by("modest", &id.to_string())))
            .collect();
        answers::complete_within(transaction, &all, limits)
    })
    .unwrap();
    drop(database);
    let (store, _) = Store::open(folder.path(), &key()).unwrap();
    (folder, store)
}

/// A store with an answer of this age for each caller.
fn aged(callers: &[(&str, u64)]) -> (tempfile::TempDir, Database) {
    let folder = tempfile::tempdir().unwrap();
    let database = open(&folder.path().join(FILE), &key()).unwrap();
    for (caller, age_ms) in callers {
        let mut record = by(caller, "0");
        record.ended_ms -= age_ms;
        write(&database, |transaction| answers::complete(transaction, &record)).unwrap();
    }
    (folder, database)
}

#[test]
fn answers_of_callers_that_are_gone_end_with_their_age() {
    let old = answers::REQUEST_AGE_MS + 60_000;
    // Written in an order in which each of them has no older caller behind it yet.
    let names: Vec<_> = (0..20).map(|number| format!("gone{number:02}")).collect();
    let mut callers: Vec<_> = names.iter().map(|name| (name.as_str(), old)).collect();
    callers.insert(10, ("fresh", 0));
    let (_folder, database) = aged(&callers);
    let left = || {
        let transaction = database.begin_read().unwrap();
        let table = transaction.open_table(Table::new("requests")).unwrap();
        table.len().unwrap()
    };
    for number in 1..=10 {
        let record = by("alive", &number.to_string());
        write(&database, |transaction| answers::complete(transaction, &record)).unwrap();
    }
    // Those of "alive", and that of "fresh".
    assert_eq!(left(), 11);
}

#[tokio::test]
async fn answer_that_is_too_old_is_given_to_no_retry() {
    let (folder, database) = aged(&[("late", answers::REQUEST_AGE_MS + 60_000)]);
    let found = |database: &Database| answers::request(database, &RequestKey::new("late", "0")).unwrap();
    assert_eq!(found(&database), None);
    // The request is carried out again, and its new answer is kept as long as any other.
    let again = by("late", "0");
    write(&database, |transaction| answers::complete(transaction, &again)).unwrap();
    assert_eq!(found(&database), Some(again.clone()));
    drop(database);
    let (store, _) = Store::open(folder.path(), &key()).unwrap();
    let kept = store.request(RequestKey::new("late", "0")).await.unwrap();
    assert_eq!(kept, Some(again));
}

#[tokio::test]
async fn caller_beyond_its_number_of_answers_loses_its_oldest() {
    let (_folder, store) = full(Limits {
        caller: Limit { count: 4, ..NO_LIMIT },
        all: NO_LIMIT,
    });
    assert_eq!(kept(&store, "greedy", 0..6).await, [2, 3, 4, 5]);
    assert_eq!(kept(&store, "modest", 0..3).await, [0, 1, 2]);
}

#[tokio::test]
async fn caller_beyond_its_bytes_loses_its_oldest() {
    let record = by("greedy", "0");
    let one = record.encoded_len() + "greedy\x000".len();
    let (_folder, store) = full(Limits {
        caller: Limit {
            bytes: u64::try_from(3 * one).unwrap(),
            ..NO_LIMIT
        },
        all: NO_LIMIT,
    });
    assert_eq!(kept(&store, "greedy", 0..6).await, [3, 4, 5]);
    assert_eq!(kept(&store, "modest", 0..3).await, [0, 1, 2]);
}

#[tokio::test]
async fn all_answers_beyond_the_limit_cost_the_caller_with_most() {
    let (_folder, store) = full(Limits {
        caller: NO_LIMIT,
        all: Limit {
            count: 7,
            bytes: 1 << 20,
        },
    });
    assert_eq!(kept(&store, "greedy", 0..6).await, [2, 3, 4, 5]);
    assert_eq!(kept(&store, "modest", 0..3).await, [0, 1, 2]);
}

/// Bytes that this thread has read from files.
fn bytes_read() -> u64 {
    let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.unwrap().parse().unwrap()
}

#[test]
fn store_after_200_000_request_ids_is_small_and_opens_unread() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    let database = open(&path, &key()).unwrap();
    let of = |number: u32| {
        let mut record = by("cert:agent", &format!("0198c1d2-0000-7000-8000-{number:012}"));
        record.response = vec![1; 100];
        record
    };
    for batch in 0..200 {
        write(&database, |transaction| {
            let answers: Vec<_> = (batch * 1000..(batch + 1) * 1000).map(of).collect();
            answers::complete_within(transaction, &answers, answers::LIMITS)
        })
        .unwrap();
    }
    drop(database);
    let size = std::fs::metadata(&path).unwrap().len();
    assert!(size < 100 << 20, "{size} bytes");
    // In a debug build redb itself reads all pages.
    let before = bytes_read();
    let database = open(&path, &key()).unwrap();
    let by_redb = bytes_read() - before;
    drop(database);
    let before = bytes_read();
    let opened = Store::open(folder.path(), &key()).unwrap();
    let read = (bytes_read() - before).saturating_sub(by_redb);
    drop(opened);
    assert!(read < 1 << 20, "{read} of {size} bytes were read");
}

#[tokio::test]
async fn aborts_outlive_their_vm_until_the_last_is_confirmed() {
    let folder = tempfile::tempdir().unwrap();
    let abort = |peer: &str, migration| AbortRecord {
        uid: vec![1; 16],
        name: "a".into(),
        peer: peer.into(),
        migration,
    };
    {
        let (store, _) = Store::open(folder.path(), &key()).unwrap();
        for abort in [abort("one:1", 1), abort("two:1", 2), abort("one:1", 3)] {
            store.put_handover(&record(1, "a"), Some(&abort)).await.unwrap();
        }
        store.confirmed(&abort("one:1", 1)).await.unwrap();
        store.again(&abort("one:1", 3)).await.unwrap();
        store
            .remove::<VmRecord>(&[1; 16], Some(tombstone(1)), None)
            .await
            .unwrap();
        store.again(&abort("two:1", 2)).await.unwrap();
    }
    {
        let (store, records) = reopen_store(folder.path());
        assert_eq!(records.vms, []);
        assert_eq!(records.aborts, [abort("one:1", 3), abort("two:1", 2)]);
        store.confirmed(&abort("one:1", 3)).await.unwrap();
        store.confirmed(&abort("two:1", 2)).await.unwrap();
    }
    assert_eq!(reopen(folder.path()).aborts, []);
}
