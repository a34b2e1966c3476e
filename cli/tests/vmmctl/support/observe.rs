//! Counters, logs and events of the daemon.

use std::time::Duration;

use tokio_stream::{StreamExt as _, wrappers::BroadcastStream};
use tonic::{Request, Response, Status};
use vmmd_api::{
    v1::{self, event_service_server::EventService},
    well_known,
};

use super::{Answer, Events, State, lock};

fn event(number: u32, reason: &str, severity: v1::EventSeverity) -> v1::Event {
    v1::Event {
        cursor: format!("c{number}"),
        time: Some(well_known::Timestamp {
            seconds: 1_700_000_000 + i64::from(number),
            nanos: 0,
        }),
        severity: severity.into(),
        reason: reason.into(),
        message: format!("what happened was {reason}"),
        object: Some(v1::ObjectReference {
            kind: "Vm".into(),
            name: "web".into(),
            ..Default::default()
        }),
        count: u64::from(number),
        ..Default::default()
    }
}

impl State {
    /// Sends an event to the watchers.
    pub fn tell(&self, number: u32, reason: &str) {
        let _ = self.events.send(event(number, reason, v1::EventSeverity::Normal));
    }

    /// How many watch events.
    pub fn event_watchers(&self) -> usize {
        self.events.receiver_count()
    }

    /// Grows by a known amount for each second of the daemon's, which passes with each sample.
    pub fn all_stats(&self, name: &str) -> Result<v1::VmStats, Status> {
        let disks = self.stats(name)?;
        let mut samples = lock(&self.samples);
        *samples += 1;
        let second = *samples;
        let time = |millis: u64| Some(Duration::from_millis(millis * second).into());
        Ok(v1::VmStats {
            name: name.into(),
            time: Some(well_known::Timestamp {
                seconds: i64::try_from(second).unwrap(),
                nanos: 0,
            }),
            cpu: Some(v1::CpuStats {
                user_time: time(1_000),
                system_time: time(500),
                vcpus: vec![v1::VcpuStats {
                    index: 0,
                    time: time(1_200),
                    steal_time: time(50),
                }],
                exits: [("exits".to_owned(), 1000 * second)].into(),
                ..Default::default()
            }),
            memory: Some(v1::MemoryStats {
                size_bytes: 1 << 30,
                used_bytes: 300 << 20,
                ..Default::default()
            }),
            disks,
            nics: vec![v1::NicStats {
                name: "eth0".into(),
                received_bytes: (1 << 20) * second,
                ..Default::default()
            }],
        })
    }

    /// Two lines of each log; the vmm's is not there for the VM called `bare`.
    pub fn logs(&self, request: &v1::GetVmLogsRequest) -> Answer<Events<v1::GetVmLogsResponse>> {
        self.find(&request.name)?;
        let log = request
            .log()
            .as_str_name()
            .trim_start_matches("VM_LOG_")
            .to_lowercase();
        if request.name == "bare" && log == "vmm" {
            return Err(Status::unavailable("no log today"));
        }
        if request.name == "rude" {
            let data = b"\x1b[2J\x1b]0;mine\x07shown\r\n".to_vec();
            let message = Ok(v1::GetVmLogsResponse { data });
            return Ok(Response::new(Box::pin(tokio_stream::iter([message]))));
        }
        let when = if request.previous { "previous " } else { "" };
        let lines = ["one", "two"].map(|line| {
            Ok(v1::GetVmLogsResponse {
                data: format!("{when}{log} {line}\n").into_bytes(),
            })
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(lines))))
    }
}

#[tonic::async_trait]
impl EventService for State {
    async fn list_events(&self, request: Request<v1::ListEventsRequest>) -> Answer<v1::ListEventsResponse> {
        let filter = request.into_inner().filter.unwrap_or_default();
        let of_disk = filter.object.as_ref().filter(|object| object.kind == "Disk");
        if let (Some(disk), Some(warning)) = (of_disk, lock(&self.play).disk_warning.clone()) {
            let mut events = [
                event(1, "DiskCreated", v1::EventSeverity::Normal),
                event(2, "DiskLargerThanFree", v1::EventSeverity::Warning),
            ];
            for event in &mut events {
                event.object = Some(disk.clone());
                event.message.clone_from(&warning);
            }
            return Ok(Response::new(v1::ListEventsResponse {
                events: events.into(),
                ..Default::default()
            }));
        }
        let mut events = vec![
            event(1, "Started", v1::EventSeverity::Normal),
            event(2, "GuestPanic", v1::EventSeverity::Warning),
        ];
        events.retain(|event| event.severity >= filter.severity);
        let wanted = filter.object.unwrap_or_default();
        let fits = |wanted: &str, is: &str| wanted.is_empty() || wanted == is;
        events.retain(|event| {
            let object = event.object.clone().unwrap_or_default();
            fits(&wanted.name, &object.name) && fits(&wanted.kind, &object.kind)
        });
        Ok(Response::new(v1::ListEventsResponse {
            events,
            cursor: "c2".into(),
            next_page_token: String::new(),
        }))
    }

    type WatchEventsStream = Events<v1::WatchEventsResponse>;

    /// Ends after an event with the reason "Ended", as if the daemon were restarted.
    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Answer<Self::WatchEventsStream> {
        self.called(format!("watch events from {}", request.into_inner().cursor));
        let mut ended = false;
        let events = BroadcastStream::new(self.events.subscribe()).filter_map(Result::ok);
        let events = events.take_while(move |event| {
            let last = ended;
            ended = event.reason == "Ended";
            !last
        });
        Ok(Response::new(Box::pin(events.map(|event| {
            let cursor = event.cursor.clone();
            let event = Some(event);
            Ok(v1::WatchEventsResponse { event, cursor })
        }))))
    }
}
